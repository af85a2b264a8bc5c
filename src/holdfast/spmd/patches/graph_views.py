"""The replaced gen_alias_from_base of AOTAutograd: a compiled graph may return a view of a DTensor.

A graph that ends in a view, as every graph break after one makes it, gives the view its gradient by taking it again
from its base. torch does that with `as_strided`, which DTensor refuses. The view's shard is a view of the base's
shard, so it is taken there instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast.spmd.base.torch_specs import local_of, storage_id


def alias_of_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of `gen_alias_from_base`."""

    @functools.wraps(original)
    def alias(base: Any, target: Any, requires_grad: bool, *args: Any, **kwargs: Any) -> Any:
        if not _is_view_of(target, base):
            return original(base, target, requires_grad, *args, **kwargs)
        out = _take_again(base if requires_grad else base.detach(), target)
        return out.requires_grad_(True) if requires_grad and not out.requires_grad else out

    return alias


def _is_view_of(target: Any, base: Any) -> bool:
    """Return True for two DTensors of which one's shard is a view of the other's."""
    return (
        type(base) is DTensor
        and type(target) is DTensor
        and base.dtype == target.dtype
        and storage_id(local_of(base)) == storage_id(local_of(target))
    )


def _take_again(base: DTensor, target: DTensor) -> DTensor:
    """Return the view that `target` is, as a view of `base` with a gradient. A Partial's gradient is replicated."""
    shard = local_of(target)
    gradient = [Replicate() if place.is_partial() else place for place in base.placements]
    taken: torch.Tensor = base.to_local(grad_placements=gradient).as_strided(
        shard.size(), shard.stride(), shard.storage_offset()
    )
    return DTensor.from_local(
        taken,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
