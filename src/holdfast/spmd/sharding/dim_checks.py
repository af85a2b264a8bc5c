"""Dims that one device refuses: out of range, or named twice. Every rank raises, before any of them works or waits.

A rule counts dims from the front, and would take the fifth of two for the second. A kernel refuses it, but not on a
rank that has nothing to work on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from holdfast.spmd.base.call import Call

NAMES = ("dim", "dims", "dim0", "dim1", "dim2", "dimension")
GROWS = ("unsqueeze", "unsqueeze_", "unsqueeze_copy", "stack", "diag_embed")  # count the dims of the result
MAY_REPEAT = ("roll",)


def refuse_wrong_dims(call: Call) -> None:
    """Raise IndexError for a dim that the first tensor has not, RuntimeError for one that is named twice."""
    places = _places(call.op)
    if not places or not (tensors := _first(call)):
        return
    limit = max(1, *(tensor.ndim for tensor in tensors))
    for place in places:
        named = call.values[place]
        dims = [named] if isinstance(named, int) else named or []
        for dim in dims:
            if not -limit <= dim < limit:
                raise out_of_range(dim, limit)
        if _name(call.op) not in MAY_REPEAT:
            _refuse_twice([dim % limit for dim in dims])


def _refuse_twice(dims: list[int]) -> None:
    for place, dim in enumerate(dims):
        if dim in dims[:place]:
            raise RuntimeError(f"dim {dim} appears multiple times in the list of dims")


def out_of_range(dim: int, limit: int) -> IndexError:
    """What one device says."""
    return IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")


def _first(call: Call) -> list[torch.Tensor]:
    """The first argument: a tensor, or a list of which each may have its own number of dims, as for cat."""
    first = call.values[0]
    tensors = first if isinstance(first, (list, tuple)) else [first]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


@functools.cache
def _places(op: Any) -> tuple[int, ...]:
    """Where an operator's dims stand among its arguments; nowhere if they are not those of its first tensor."""
    if _name(op) in GROWS or _name(op).endswith("_backward"):
        return ()
    return tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in NAMES)


def _name(op: Any) -> str:
    return str(op._schema.name).removeprefix("aten::")
