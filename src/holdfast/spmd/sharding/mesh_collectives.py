"""all_reduce, all_gather, all_to_all of rows, and extremes in which NaN propagates, over given mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from holdfast.spmd.base.torch_modes import is_tracing

# Older torch has only the second name.
ALL_GATHER = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int], how: str = "sum") -> torch.Tensor:
    """Return the sum (or "max", "min") of every rank's tensor along mesh axes."""
    result = tensor.contiguous()
    for axis in axes:
        if mesh.size(axis) > 1:
            result = functional.all_reduce(result, how, (mesh, axis))
            if isinstance(result, functional.AsyncCollectiveTensor):
                result = result.wait()
    return result


SAME_SIZE_INTEGERS = {8: torch.int64, 4: torch.int32}  # integer dtypes by the size of floats


def all_reduce_extreme(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int], largest: bool) -> torch.Tensor:
    """Return the largest or smallest of every rank's tensor; unlike in collectives, NaN propagates.

    Floats are sent as integers of the same order, with NaN mapped to the last or the first of them.
    """
    how = "max" if largest else "min"
    if not tensor.dtype.is_floating_point:
        return all_reduce(tensor, mesh, axes, how)
    wide = tensor if tensor.element_size() in SAME_SIZE_INTEGERS else tensor.to(torch.float32)
    kind = SAME_SIZE_INTEGERS[wide.element_size()]
    nothing = torch.iinfo(kind).max if largest else torch.iinfo(kind).min
    bits = torch.where(wide.isnan(), nothing, _ordered_bits(wide.contiguous().view(kind)))
    return _ordered_bits(all_reduce(bits, mesh, axes, how)).view(wide.dtype).to(tensor.dtype)


def _ordered_bits(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floats to integers of the same order, and back: negative floats count backwards."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def all_gather(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Return every rank's tensor along one mesh axis, stacked in rank order; all must have one shape."""
    result = ALL_GATHER(tensor.contiguous().unsqueeze(0), 0, (mesh, axis))
    return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result


def all_to_all_rows(
    rows: torch.Tensor, receives: Sequence[int], sends: Sequence[int], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """Send `sends[r]` rows to each rank r of a mesh axis; return the received rows in rank order."""
    if not len(rows) and any(receives) and not is_tracing() and dist.get_backend(mesh.get_group(axis)) == "fake":
        return rows.new_zeros(sum(receives), *rows.shape[1:])  # a fake group refuses to receive where nothing is sent
    result = functional.all_to_all_single(rows, list(receives), list(sends), (mesh, axis))
    return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result
