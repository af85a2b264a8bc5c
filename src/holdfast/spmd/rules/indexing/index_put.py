"""x[index] = value and x[mask] = value: each rank writes the rows that are its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, Spot, is_shard, moved, whole, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.indexing.put_signature import slices_put, values_fit
from holdfast.spmd.rules.pointwise.pointwise import LETTERS
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.partials import is_partial
from holdfast.spmd.sharding.signature import FIXED, Chosen, Signature, run_sharded


def index_put(call: Call) -> Any:
    """Row indices and full masks stay local; every other form is done on the whole tensor."""
    target, indices = call.values[0], call["indices"]
    if not isinstance(target, DTensor) or not all(
        is_shard(place) or isinstance(place, Replicate) for place in target.placements
    ):
        if isinstance(target, DTensor) and _parts_fit(call, target):
            return _part_by_part(call, target)
        added = call["accumulate"] and not (private.is_oldest() and _has_shards(call))
        return LEAVE if added else gather_and_run(call)  # what is added may be added to a Partial
    if any(index is not None and index.dtype == torch.uint8 for index in indices):  # a mask, to torch
        return gather_and_run(call)
    if not values_fit(call, target):
        return gather_and_run(call)  # which raises on every rank, not only on those that are given values
    if (signature := _beside(call, target)) is not None:
        return run_sharded(call, signature)
    if not any(is_shard(place) for place in target.placements):
        return _slices(call, target) if any(_is_sharded(tensor) for _, tensor in call.spots()) else LEAVE
    masks = any(index is not None and index.dtype == torch.bool for index in indices)
    indexed = _indexed(indices)
    if not any(is_shard(place) and place.dim in indexed for place in target.placements):
        if masks and any(map(_is_sharded, indices)):
            return _where_it_lies(call, target)
        return _slices(call, target) if private.is_oldest() and is_partial(call["values"]) else LEAVE
    first = indices[0] if len(indices) == 1 else None
    if first is None:
        return _slices(call, target)
    if first.dtype == torch.bool and first.shape == target.shape and call["values"].numel() == 1:
        return _masked(call, target, first)
    if first.dtype != torch.bool:
        return _rows(call, target, first)
    return gather_and_run(call)


def _parts_fit(call: Call, target: DTensor) -> bool:
    """Whether target and values are Partials alike, and no element is written twice: of two, ranks may keep either."""
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


def _part_by_part(call: Call, target: DTensor) -> DTensor:
    """Each rank writes its part of the values into its part of the target."""
    local, result = _written(call, target)
    indices = [None if index is None else whole(index) for index in call["indices"]]
    torch.ops.aten.index_put_.default(local, indices, private.local_of(call["values"]))
    return result


def _beside(call: Call, target: DTensor) -> Signature | None:
    """The letters of a call that puts whole rows, sharded along other dims, into a copy; None for any other call."""
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
    """By integers, into a copy: indices are brought to all ranks, and what they choose from; other dims stay cut."""
    signature = slices_put(call, target)
    if signature is None:
        return gather_and_run(call)

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> Any:
        for dim, index in enumerate(call["indices"]):
            if index is not None and private.can_be_read(index):
                _refuse_outside(tensors[1, dim], dim, target.shape[dim])
        return call.run(tensors)

    return run_sharded(call, signature, local, skip_empty=False, share=True)


def _where_it_lies(call: Call, target: DTensor) -> Any:
    """One value by masks of dims that are whole: the masks are brought to all ranks, and the target stays."""
    if call["values"].numel() != 1:
        return gather_and_run(call)
    local, result = _written(call, target)
    masks: dict[Spot, torch.Tensor] = {spot: whole(mask) for spot, mask in call.spots() if len(spot) == 2}
    value = whole(call["values"]).reshape(()).to(local.device)
    local.copy_(call.run({(0,): local, **masks, (2,): value}))
    return result


def _refuse_outside(index: torch.Tensor, dim: int, size: int) -> None:
    """Raise as one device does, also on a rank whose part of the other dims is empty and whose kernel looks at none."""
    wrong = index[(index < -size) | (index >= size)]
    if wrong.numel():
        raise IndexError(f"index {int(wrong[0])} is out of bounds for dimension {dim} with size {size}")


def _indexed(indices: Any) -> set[int]:
    """The dims that indices choose from; a mask has several."""
    found: set[int] = set()
    dim = 0
    for index in indices:
        covered = index.ndim if index is not None and index.dtype == torch.bool else 1
        if index is not None:
            found |= set(range(dim, dim + covered))
        dim += covered
    return found


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not all(place.is_replicate() for place in tensor.placements)


def _has_shards(call: Call) -> bool:
    """Whether anything is sharded: beside a Partial torch 2.11 counts rows against the shard."""
    return any(is_shard(place) for _, t in call.spots() if isinstance(t, DTensor) for place in t.placements)


def _written(call: Call, target: DTensor) -> tuple[torch.Tensor, DTensor]:
    """The local tensor to write into, and the tensor to return."""
    if call.is_inplace:
        return private.local_of(target), target
    local = private.local_of(target).clone(memory_format=torch.contiguous_format)  # else `wrap` would copy it once more
    return local, wrap(local, call.mesh, target.placements, target.shape)


def _masked(call: Call, target: DTensor, mask: DTensor) -> DTensor:
    local, result = _written(call, target)
    own, value = moved(mask, target.placements, call.mesh), whole(call["values"]).reshape(())
    if call["accumulate"]:
        local.copy_(torch.where(own, local + value, local))
    else:
        local.masked_fill_(own, value)
    return result


def _rows(call: Call, target: DTensor, index: Any) -> DTensor:
    rows = whole(index)
    count = target.shape[0]
    _refuse_outside(rows, 0, count)
    sizes, offsets = private.local_box(target.shape, call.mesh, target.placements)
    local, result = _written(call, target)
    values = _values_beside(call, target, (*rows.shape, *target.shape[1:]))
    place = torch.where(rows < 0, rows + count, rows) - offsets[0]
    own = (place >= 0) & (place < sizes[0])
    if bool(own.any()):
        local.index_put_((place[own],), values[own], call["accumulate"])
    return result


def _values_beside(call: Call, target: DTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The values of every row, cut along the other dims as the target is."""
    values = call["values"]
    ahead = len(shape) - target.ndim
    places = [Shard(p.dim + ahead) if is_shard(p) and p.dim else Replicate() for p in target.placements]
    if not isinstance(values, DTensor) or tuple(values.shape) != shape:
        values = whole(values).to(private.local_of(target).device).expand(shape)  # a number may lie on the CPU
    return moved(values, places, call.mesh)


RULES = [
    Rule(
        "indexing",
        ("index_put.default", "index_put_.default", "_index_put_impl_.default"),
        "rows by index; every dim by a mask of the same shape and one value",
        "torch raises on the sharded dim and for plain indices",
        index_put,
    ),
]
