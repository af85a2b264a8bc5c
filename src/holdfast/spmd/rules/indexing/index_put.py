"""index_put with index tensors or masks, x[index] = value: each rank writes its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_modes import can_be_read, is_tracing
from holdfast.spmd.base.torch_specs import local_box, local_of
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.index_checks import MASKS
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, wrap
from holdfast.spmd.sharding.partials import is_partial
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import FIXED, LETTERS, ChosenPlacements, Signature, run_sharded


def index_put(call: Call) -> Any:
    """Run row indices and full masks locally; gather every other form."""
    target, indices = call.values[0], call["indices"]
    if not isinstance(target, DTensor) or not all(
        is_shard(place) or isinstance(place, Replicate) for place in target.placements
    ):
        if isinstance(target, DTensor) and _partials_fit(call, target):
            return _put_partials(call, target)
        added = call["accumulate"] and not (is_torch_2_11() and _has_shards(call))
        return USE_TORCH if added else gather_and_run(call)  # values may be added to a Partial
    if any(index is not None and index.dtype == torch.uint8 for index in indices):  # torch treats uint8 as a mask
        return gather_and_run(call)
    if not values_fit(call, target):
        return gather_and_run(call)  # raises on every rank, not only on those that get values
    if (signature := _full_rows_signature(call, target)) is not None:
        return run_sharded(call, signature)
    if not any(is_shard(place) for place in target.placements):
        return _slices(call, target) if any(_is_sharded(tensor) for _, tensor in call.tensor_args()) else USE_TORCH
    masks = any(index is not None and index.dtype == torch.bool for index in indices)
    indexed = _indexed(indices)
    if not any(is_shard(place) and place.dim in indexed for place in target.placements):
        if masks and any(map(_is_sharded, indices)):
            return _put_by_masks(call, target)
        return _slices(call, target) if is_torch_2_11() and is_partial(call["values"]) else USE_TORCH
    first = indices[0] if len(indices) == 1 else None
    if first is None:
        return _slices(call, target)
    if first.dtype == torch.bool and first.shape == target.shape and call["values"].numel() == 1:
        return _masked(call, target, first)
    if first.dtype != torch.bool:
        return _rows(call, target, first)
    return gather_and_run(call)


def _partials_fit(call: Call, target: DTensor) -> bool:
    """Return True if target and values are Partial alike, and no element is written twice: ranks differ in order."""
    values, indices = call["values"], [index for index in call["indices"] if index is not None]
    return (
        isinstance(values, DTensor)
        and not call["accumulate"]
        and values.placements == target.placements
        and not any(is_shard(place) for place in target.placements)
        and not any(map(_is_sharded, indices))
        and (all(i.dtype == torch.bool for i in indices) or all(i.numel() == 1 for i in indices))
        and values_fit(call, target)
    )


def _put_partials(call: Call, target: DTensor) -> DTensor:
    """Write each rank's Partial values into its Partial target."""
    local, result = _written(call, target)
    indices = [None if index is None else full_tensor(index) for index in call["indices"]]
    torch.ops.aten.index_put_.default(local, indices, local_of(call["values"]))
    return result


def _full_rows_signature(call: Call, target: DTensor) -> Signature | None:
    """Return the signature of a put of full rows, sharded along other dims, into a copy; None for other calls."""
    indices, values = call["indices"], call["values"]
    if call.is_inplace or len(indices) != 1 or indices[0].dtype == torch.bool or not _is_sharded(values):
        return None
    index = indices[0]
    if _is_sharded(index) or list(values.shape) != [*index.shape, *target.shape[1:]]:
        return None
    rest = LETTERS[: target.ndim - 1]
    if any(is_shard(place) and place.dim < index.ndim for place in values.placements):
        return None
    if any(place.is_partial() for place in (*values.placements, *target.placements)):
        return None
    return Signature((FIXED + rest, FIXED * index.ndim, FIXED * index.ndim + rest), (FIXED + rest,), rest)


def _slices(call: Call, target: DTensor) -> Any:
    """Put by integers into a copy: replicate the indices and the indexed dims; other dims stay sharded."""
    signature = integer_put_signature(call, target)
    if signature is None:
        return gather_and_run(call)

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> Any:
        for dim, index in enumerate(call["indices"]):
            if index is not None and can_be_read(index):
                _refuse_outside(tensors[1, dim], dim, target.shape[dim])
        return call.run(tensors)

    return run_sharded(call, signature, local, skip_empty=False, share=True)


def _put_by_masks(call: Call, target: DTensor) -> Any:
    """Put one value by masks of whole dims: replicate the masks; the target is not moved."""
    if call["values"].numel() != 1:
        return gather_and_run(call)
    local, result = _written(call, target)
    masks: dict[ArgSlot, torch.Tensor] = {
        slot: full_tensor(mask) for slot, mask in call.tensor_args() if len(slot) == 2
    }
    value = full_tensor(call["values"]).reshape(()).to(local.device)
    local.copy_(call.run({(0,): local, **masks, (2,): value}))
    return result


def _refuse_outside(index: torch.Tensor, dim: int, size: int) -> None:
    """Raise as one device does, also on a rank with an empty shard, whose kernel checks nothing."""
    if is_tracing():
        return  # a trace has no values; the kernel checks
    wrong = index[(index < -size) | (index >= size)]
    if wrong.numel():
        raise IndexError(f"index {int(wrong[0])} is out of bounds for dimension {dim} with size {size}")


def _indexed(indices: Any) -> set[int]:
    """Return the dims that are indexed; a mask covers several."""
    dims: set[int] = set()
    dim = 0
    for index in indices:
        covered = index.ndim if index is not None and index.dtype == torch.bool else 1
        if index is not None:
            dims |= set(range(dim, dim + covered))
        dim += covered
    return dims


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not all(place.is_replicate() for place in tensor.placements)


def _has_shards(call: Call) -> bool:
    """Return True if any tensor is sharded: next to a Partial, torch 2.11 compares rows with the shard's."""
    return any(is_shard(place) for _, t in call.tensor_args() if isinstance(t, DTensor) for place in t.placements)


def _written(call: Call, target: DTensor) -> tuple[torch.Tensor, DTensor]:
    """Return the local tensor to write into, and the tensor to return."""
    if call.is_inplace:
        return local_of(target), target
    local = local_of(target).clone(memory_format=torch.contiguous_format)  # else `wrap` would copy again
    return local, wrap(local, call.mesh, target.placements, target.shape)


def _masked(call: Call, target: DTensor, mask: DTensor) -> DTensor:
    local, result = _written(call, target)
    own, value = local_part(mask, target.placements, call.mesh), full_tensor(call["values"]).reshape(())
    if call["accumulate"]:
        local.copy_(torch.where(own, local + value, local))
    else:
        local.masked_fill_(own, value)
    return result


def _rows(call: Call, target: DTensor, index: Any) -> DTensor:
    rows = full_tensor(index)
    count = target.shape[0]
    _refuse_outside(rows, 0, count)
    sizes, offsets = local_box(target.shape, call.mesh, target.placements)
    local, result = _written(call, target)
    values = _values_for_rows(call, target, (*rows.shape, *target.shape[1:]))
    place = torch.where(rows < 0, rows + count, rows) - offsets[0]
    own = (place >= 0) & (place < sizes[0])
    if bool(own.any()):
        local.index_put_((place[own],), values[own], call["accumulate"])
    return result


def _values_for_rows(call: Call, target: DTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of every row, sharded along the other dims as the target is."""
    values = call["values"]
    ahead = len(shape) - target.ndim
    places = [Shard(p.dim + ahead) if is_shard(p) and p.dim else Replicate() for p in target.placements]
    if not isinstance(values, DTensor) or tuple(values.shape) != shape:
        values = full_tensor(values).to(local_of(target).device).expand(shape)  # a scalar may be on the CPU
    return local_part(values, places, call.mesh)


RULES = [
    Rule(
        "indexing",
        ("index_put.default", "index_put_.default", "_index_put_impl_.default"),
        "rows by index; every dim by a mask of the same shape and one value",
        "torch raises on the sharded dim and for plain indices",
        index_put,
    ),
]


def integer_put_signature(call: Call, target: torch.Tensor) -> Signature | None:
    """Return the signature of an index_put by integers into a copy; None for masks and in-place calls."""
    indices, values = call["indices"], call["values"]
    chosen = {dim: index for dim, index in enumerate(indices) if index is not None}
    if call.is_inplace or not chosen or any(index.dtype in MASKS for index in chosen.values()):
        return None
    letters = "".join(FIXED if dim in chosen else LETTERS[dim] for dim in range(target.ndim))
    value_letters, shape = _value_letters(chosen, target, letters)
    if values.ndim > len(value_letters):
        return None
    start = len(value_letters) - values.ndim
    own = "".join(
        letter if size == whole else FIXED
        for letter, size, whole in zip(value_letters[start:], values.shape, shape[start:], strict=True)
    )
    keys = (FIXED * index.ndim for index in chosen.values())
    return Signature((letters, *keys, own), (letters,), letters.replace(FIXED, ""))


def values_fit(call: Call, target: torch.Tensor) -> bool:
    """Return True if values put by integers broadcast to the indexed shape; masks are not checked."""
    chosen = {dim: index for dim, index in enumerate(call["indices"]) if index is not None}
    if not chosen or any(index.dtype in MASKS for index in chosen.values()):
        return True
    if max(chosen) >= target.ndim or not _are_broadcast([index.shape for index in chosen.values()]):
        return False
    _, shape = _value_letters(chosen, target, LETTERS[: target.ndim])
    own = list(call["values"].shape)
    extra = max(0, len(own) - len(shape))
    return all(size == 1 for size in own[:extra]) and _are_broadcast([own[extra:], shape], shape)


def _are_broadcast(shapes: Sequence[Sequence[int]], to: Sequence[int] | None = None) -> bool:
    """Return True if tensors of these shapes broadcast (to the shape `to`)."""
    try:
        together = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return to is None or list(together) == list(to)


def _value_letters(chosen: dict[int, Any], target: torch.Tensor, letters: str) -> tuple[str, list[int]]:
    """Return the letters and sizes of the put values: index dims replace the indexed dims, or come first."""
    block = torch.broadcast_shapes(*(index.shape for index in chosen.values()))  # type: ignore[no-untyped-call]
    dims = sorted(chosen)
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    kept = [dim for dim in range(target.ndim) if dim not in chosen]
    before, after = [dim for dim in kept if dim < first], [dim for dim in kept if dim >= first]
    value_letters = (
        "".join(letters[dim] for dim in before) + FIXED * len(block) + "".join(letters[dim] for dim in after)
    )
    return value_letters, [*(target.shape[dim] for dim in before), *block, *(target.shape[dim] for dim in after)]
