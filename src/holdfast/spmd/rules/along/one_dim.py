"""Operators that work along one dim: every other dim may be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, Spot, is_shard
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.pointwise.pointwise import LETTERS, aligned
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.signature import FIXED, Chosen, Signature, run_sharded


def _letters(dims: int, fixed: int) -> str:
    return "".join(FIXED if dim == fixed else LETTERS[dim] for dim in range(dims))


def along(results: int = 1) -> Callable[[Call], Any]:
    """All tensors have the same sizes but along `dim`; so have the results."""

    def run(call: Call) -> Any:
        tensors = [tensor for _, tensor in call.spots()]
        first = tensors[0]
        if not first.ndim or not any(isinstance(t, DTensor) and _shards(t) for t in tensors):
            return LEAVE
        dim = call["dim" if "dim" in call.names else "dimension"] % first.ndim
        letters = _letters(first.ndim, dim)
        for tensor in tensors:
            if tensor.ndim != first.ndim or any(
                tensor.shape[d] != first.shape[d] for d in range(first.ndim) if d != dim
            ):
                return LEAVE
        free = letters.replace(FIXED, "")
        return run_sharded(call, Signature((letters,) * len(tensors), (letters,) * results, free))

    return run


def look_up(call: Call) -> Any:
    """gather: each rank looks into the part that it has, and gives nothing for what others have; these are summed."""
    tensor, index = call.values[0], call["index"]
    dim = call["dim"] % index.ndim
    cut = isinstance(tensor, DTensor) and any(is_shard(place) and place.dim == dim for place in tensor.placements)
    if not cut and not has_empty(call):
        return LEAVE
    letters = _letters(index.ndim, dim).replace(FIXED, "y")
    asked = letters.replace("y", "z")

    def local(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> torch.Tensor:
        own, indices = tensors.values()
        sizes, offsets = private.local_box(tensor.shape, call.mesh, chosen.inputs[0])
        if sizes[dim] == tensor.shape[dim]:
            return call.run(tensors)  # type: ignore[no-any-return]
        nothing = own.new_zeros(())
        if not sizes[dim]:
            return nothing.expand(indices.shape)
        place = indices - offsets[dim]
        inside = (place >= 0) & (place < sizes[dim])
        return torch.where(inside, own.gather(dim, place.clamp(0, sizes[dim] - 1)), nothing)

    signature = Signature((letters, asked), (asked,), letters + "z", sums=((0,), (0,)))
    return run_sharded(call, signature, local, skip_empty=False)


def picked(call: Call) -> Any:
    """gather and scatter, whose index may be smaller than the tensor: shards of such a dim do not lie side by side."""
    tensors = [tensor for _, tensor in call.spots()]
    dims = {tensor.ndim for tensor in tensors}
    if len(dims) > 1 or dims == {0}:
        return LEAVE
    dim = call["dim"] % tensors[0].ndim
    unequal = {d for d in range(tensors[0].ndim) if d != dim and len({tensor.shape[d] for tensor in tensors}) > 1}
    if not unequal:
        way = SIZES_AGREE.get(call.op._schema.name.removeprefix("aten::"))
        return LEAVE if way is None else way(call)
    if all(place.is_replicate() for tensor in tensors if isinstance(tensor, DTensor) for place in tensor.placements):
        return LEAVE
    if call.is_inplace:
        return gather_and_run(call)
    letters = "".join(FIXED if d in unequal else letter for d, letter in enumerate(_letters(tensors[0].ndim, dim)))
    return run_sharded(call, Signature((letters,) * len(tensors), (letters,), letters.replace(FIXED, "")))


def crossed(call: Call) -> Any:
    """linalg.cross of tensors that are broadcast together."""
    first, second = call.values[:2]
    if first.shape == second.shape or first.ndim != second.ndim:
        return LEAVE
    common = aligned(call, 1)
    along_dim = common.outputs[0][call["dim"] % first.ndim]
    inputs = tuple(letters.replace(along_dim, FIXED) for letters in common.inputs)
    output, free = common.outputs[0].replace(along_dim, FIXED), common.free.replace(along_dim, "")
    return run_sharded(call, Signature(inputs, (output,), free))


def slices(call: Call) -> Any:
    """renorm: each slice along `dim` by itself."""
    tensor = call.values[0]
    dim = call["dim"] % tensor.ndim
    letters = "".join("n" if d == dim else FIXED for d in range(tensor.ndim))
    return run_sharded(call, Signature((letters,), (letters,), "n"))


def when_empty(call: Call) -> Any:
    """Where some dim but `dim` is sharded: there is something to keep."""
    dim = call["dim"] % max(call.values[0].ndim, 1)
    kept = any(
        is_shard(place) and place.dim != dim
        for _, tensor in call.spots()
        if isinstance(tensor, DTensor)
        for place in tensor.placements
    )
    return along(len(call.op._schema.returns))(call) if kept and has_empty(call) else LEAVE


def _shards(tensor: DTensor) -> bool:
    return any(is_shard(place) for place in tensor.placements)


SIZES_AGREE = {"gather": look_up, "scatter_add": when_empty, "scatter_reduce": along()}  # beside torch's own way

RULES = [
    Rule(
        "along",
        ("unfold.default",),
        "every dim but `dim`, where the sizes agree",
        "torch has no strategy, or gathers when rows are fewer than ranks",
        along(),
    ),
    Rule(
        "along",
        ("sort.default", "sort.stable"),
        "every dim but `dim`",
        "torch gathers when rows are fewer than ranks",
        when_empty,
    ),
    Rule(
        "along",
        ("linalg_cross.default",),
        "every dim but `dim`",
        "torch pairs shards of a dim of size 1 with those of a longer one",
        crossed,
    ),
    Rule("along", ("renorm.default",), "the dim `dim`", "torch has no strategy", slices),
]
