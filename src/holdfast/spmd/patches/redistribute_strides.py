"""What a redistribution leaves in memory: in the order that the DTensor's strides say, which views rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.spmd.base import torch_private as private


def kept_in_order(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """Redistribution of a transposed or expanded tensor that gives a transposed or expanded part.

    torch's collectives and slices give a row-major part and leave the strides of the whole as they were. What is
    computed from it lies otherwise than torch believes, and a view of that raises, on some ranks or on all.
    """

    def redistribute_local_tensor(local: torch.Tensor, present: Any, wanted: Any, **options: Any) -> torch.Tensor:
        moved: torch.Tensor = torch_way(local, present, wanted, **options)
        meta = present.tensor_meta
        if moved is local or meta is None or private.is_tracing() or _is_row_major(meta.stride):
            return moved
        return _laid(moved, meta.stride, local.stride())

    return redistribute_local_tensor


def _is_row_major(strides: Sequence[int]) -> bool:
    after = 1
    for stride in reversed(strides):
        if stride < after:
            return False
        after = stride
    return True


def _laid(part: torch.Tensor, strides: Sequence[int], before: Sequence[int]) -> torch.Tensor:
    """A part with its dims in the order of `strides`; what is one number over and over stays so."""
    if part.ndim != len(strides) or not part.numel():
        return part
    shape = part.shape
    for dim, (stride, here) in enumerate(zip(strides, before, strict=True)):
        if stride == here == 0:
            part = part.narrow(dim, 0, 1)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    back = sorted(range(len(order)), key=order.__getitem__)
    return part.permute(order).contiguous().permute(back).expand(shape)
