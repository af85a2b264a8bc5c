"""DTensor redistribution that keeps the strides of transposed and expanded tensors, which later views rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.torch_modes import is_tracing, simulates_ranks
from holdfast.spmd.sharding.shard_sizes import has_empty_shard


def keep_strides(original: Callable[..., Any]) -> Callable[..., Any]:
    """Redistribute a transposed or expanded tensor to local tensors that are transposed or expanded.

    torch's collectives and slices return row-major tensors and leave the global strides unchanged. Results computed
    from them then have other strides than torch believes, and views of these raise, on some ranks or on all. Before
    2.13 what was padded for a collective is a slice, of which views raise too.
    """

    def redistribute_local_tensor(local: torch.Tensor, present: Any, wanted: Any, **options: Any) -> torch.Tensor:
        moved: torch.Tensor = original(local, present, wanted, **options)
        meta = present.tensor_meta
        if moved is local or meta is None or is_tracing():
            return moved
        if _is_row_major(meta.stride):
            return moved if torch_versions.AT_LEAST_2_13 else moved.contiguous()
        if simulates_ranks() and has_empty_shard(meta.shape, wanted.mesh, wanted.placements):
            return moved  # one shape stands for all ranks, and an empty shard has no rows to expand
        return _with_dim_order(moved, meta.stride, local.stride())

    return redistribute_local_tensor


def _is_row_major(strides: Sequence[int]) -> bool:
    after = 1
    for stride in reversed(strides):
        if stride < after:
            return False
        after = stride
    return True


def _with_dim_order(local: torch.Tensor, strides: Sequence[int], before: Sequence[int]) -> torch.Tensor:
    """Return a local tensor with its dims in the memory order of `strides`; expanded dims stay expanded."""
    if local.ndim != len(strides) or not local.numel():
        return local
    shape = local.shape
    for dim, (stride, here) in enumerate(zip(strides, before, strict=True)):
        if stride == here == 0:
            local = local.narrow(dim, 0, 1)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    back = sorted(range(len(order)), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back).expand(shape)
