"""Dims that one device refuses, out of range or repeated: every rank raises before any of them computes or waits.

A rule takes dims modulo the number of dims, and would accept one that is out of range. A kernel refuses it, but not on
a rank with an empty shard.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from holdfast.spmd.base.call import Call

NAMES = ("dim", "dims", "dim0", "dim1", "dim2", "dimension")
GROWS = ("unsqueeze", "unsqueeze_", "unsqueeze_copy", "stack", "diag_embed")  # their dims are those of the result
MAY_REPEAT = ("roll",)


def check_dims(call: Call) -> None:
    """Raise IndexError for a dim that the first tensor lacks, RuntimeError for one that is repeated."""
    places = _places(call.op)
    if not places or not (tensors := _first(call)):
        return
    ndim = max(tensor.ndim for tensor in tensors)
    limit = ndim + 1 if _name(call.op) in GROWS else max(1, ndim)
    for place in places:
        named = call.values[place]
        dims = [named] if isinstance(named, int) else named or []
        for dim in dims:
            if not -limit <= dim < limit:
                raise dim_out_of_range(dim, limit)
        if _name(call.op) not in MAY_REPEAT:
            _refuse_repeated([dim % limit for dim in dims])


def _refuse_repeated(dims: list[int]) -> None:
    for place, dim in enumerate(dims):
        if dim in dims[:place]:
            raise RuntimeError(f"dim {dim} appears multiple times in the list of dims")


def dim_out_of_range(dim: int, limit: int) -> IndexError:
    """Return the error of one device."""
    return IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")


def _first(call: Call) -> list[torch.Tensor]:
    """Return the first argument as a list of tensors; the tensors of cat may differ in their number of dims."""
    first = call.values[0]
    tensors = first if isinstance(first, (list, tuple)) else [first]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


@functools.cache
def _places(op: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that name dims of the first tensor."""
    if _name(op).endswith("_backward"):
        return ()
    return tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in NAMES)


def _name(op: Any) -> str:
    return str(op._schema.name).removeprefix("aten::")
