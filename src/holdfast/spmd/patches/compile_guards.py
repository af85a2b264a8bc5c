"""Dynamo's guard on the spec of a DTensor: a graph is reused only for sizes that are sharded as those it was made for.

torch compares placements and each rank's local sizes. On 2 ranks, 5 rows then run the graph of 6 rows on the first rank
and that of 4 rows on the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[..., bool]


def check_spec(original: Check) -> Check:
    """Return the replacement of Dynamo's comparison of two specs."""
    return lambda spec, traced: original(spec, traced) and _is_sharded_alike(spec, traced)


def check_equal_specs(original: Check) -> Check:
    """Return the replacement for torch 2.11, whose guard calls the specs' own comparison."""

    def check(spec: Any, other: Any, skip_shapes: bool = False) -> bool:
        return original(spec, other, skip_shapes) and (not skip_shapes or _is_sharded_alike(spec, other))

    return check


def _is_sharded_alike(spec: Any, traced: Any) -> bool:
    """Return True if every sharded dim has the traced size, or both are even; the same answer on every rank."""
    if spec.tensor_meta is None or spec.tensor_meta.shape == traced.tensor_meta.shape:
        return True
    if len(spec.shape) != len(traced.shape):
        return False
    for dim, (size, traced_size) in enumerate(zip(spec.shape, traced.shape, strict=True)):
        axes = (axis for axis, place in enumerate(spec.placements) if getattr(place, "dim", None) == dim)
        shards = math.prod(spec.mesh.size(axis) for axis in axes)
        if size != traced_size and (size % shards or traced_size % shards):
            return False
    return True
