"""torch.gather along sharded dims by masks; gather and scatter whose index is smaller than the tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_box, local_of
from holdfast.spmd.rules.along.one_dim import along, letters_except, when_empty
from holdfast.spmd.rules.indexing.lookup import Lookup, local_indices, sum_over_ranks
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.index_checks import is_replicated
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.shard_sizes import is_shard, only_sharding_axis
from holdfast.spmd.sharding.signature import (
    FIXED,
    LETTERS,
    ChosenPlacements,
    Signature,
    run_sharded,
)


def masked_gather(call: Call) -> Any:
    """Run gather: each rank gathers from its shard, with zeros for indices of other ranks; the results are summed."""
    tensor, index = call.values[0], call["index"]
    dim = call["dim"] % index.ndim
    is_sharded = isinstance(tensor, DTensor) and any(
        is_shard(place) and place.dim == dim for place in tensor.placements
    )
    if not is_sharded and not has_empty_input(call):
        return USE_TORCH
    letters = letters_except(index.ndim, dim).replace(FIXED, "y")
    asked = letters.replace("y", "z")

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
        own, indices = tensors.values()
        sizes, offsets = local_box(tensor.shape, call.mesh, chosen.inputs[0])
        if sizes[dim] == tensor.shape[dim]:
            return call.run(tensors)  # type: ignore[no-any-return]
        zero = own.new_zeros(())
        if not sizes[dim]:
            return zero.expand(indices.shape)
        place = indices - offsets[dim]
        inside = (place >= 0) & (place < sizes[dim])
        return torch.where(inside, own.gather(dim, place.clamp(0, sizes[dim] - 1)), zero)

    signature = Signature((letters, asked), (asked,), letters + "z", sums=((0,), (0,)))
    return run_sharded(call, signature, local, skip_empty=False)


def gather_or_scatter(call: Call) -> Any:
    """Run gather and scatter with an index smaller than the tensor: shards of such a dim do not match."""
    tensors = [tensor for _, tensor in call.tensor_args()]
    dims = {tensor.ndim for tensor in tensors}
    if len(dims) > 1 or dims == {0}:
        return USE_TORCH
    dim = call["dim"] % tensors[0].ndim
    others = [d for d in range(tensors[0].ndim) if d != dim]
    unequal = {d for d in others if any(tensor.shape[d] != tensors[0].shape[d] for tensor in tensors)}
    if not unequal:
        rule = SIZES_AGREE.get(call.op._schema.name.removeprefix("aten::"))
        return USE_TORCH if rule is None else rule(call)
    if all(place.is_replicate() for tensor in tensors if isinstance(tensor, DTensor) for place in tensor.placements):
        return USE_TORCH
    if call.is_inplace:
        return gather_and_run(call)
    letters = "".join(
        FIXED if d in unequal else letter for d, letter in enumerate(letters_except(tensors[0].ndim, dim))
    )
    return run_sharded(call, Signature((letters,) * len(tensors), (letters,), letters.replace(FIXED, "")))


SIZES_AGREE = {"gather": masked_gather, "scatter_add": when_empty, "scatter_reduce": along()}  # other operators: torch


def gather(call: Call) -> Any:
    """Run gather; one element per row is left Partial, which may be read repeatedly, unlike torch's own."""
    tensor, index = call.values[0], call["index"]
    if not tensor.ndim or tensor.ndim != index.ndim or tensor.dtype.is_complex:
        return gather_or_scatter(call)
    dim = call["dim"] % tensor.ndim
    axis, single = only_sharding_axis(tensor, dim), index.shape[dim] == 1
    if axis is None or not (single or is_replicated(index)):
        return gather_or_scatter(call) if is_replicated(index) else _rowwise(call, dim)
    places = tuple(Replicate() if place == Shard(dim) else place for place in tensor.placements)
    if any(is_shard(place) and index.shape[place.dim] != tensor.shape[place.dim] for place in places):
        return gather_or_scatter(call)
    lookup = Lookup(tensor, dim, axis, local_part(index, places, call.mesh), tuple(index.shape), places)
    if not lookup.is_cheaper:
        return gather_or_scatter(call)
    if not lookup.is_in_range:
        raise RuntimeError(f"index is out of bounds for dimension {dim} with size {tensor.shape[dim]}")
    own, there = local_indices(lookup)
    local = local_of(tensor)
    numbers = local.gather(dim, own) if local.shape[dim] else local.new_zeros(own.shape)
    if not single or not numbers.is_floating_point():  # torch divides integers to make a Partial sum of them
        return sum_over_ranks(lookup, numbers, there)
    sums = [Partial() if number == axis else place for number, place in enumerate(places)]
    return wrap(numbers.masked_fill(~there, 0), call.mesh, sums, lookup.shape)


def _rowwise(call: Call, dim: int) -> Any:
    """Gather one element per row with sharded indices: torch may shard the tensor, and then mixes up its masks."""
    tensor, index = call.values[0], call["index"]
    others = [place for place in range(tensor.ndim) if place != dim]
    if index.shape[dim] != 1 or any(tensor.shape[place] != index.shape[place] for place in others):
        return gather_or_scatter(call)
    if tensor.placements == index.placements and not any(is_shard(p) and p.dim == dim for p in index.placements):
        return gather_or_scatter(call)
    letters = "".join(FIXED if place == dim else LETTERS[place] for place in range(tensor.ndim))
    free = letters.replace(FIXED, "")
    return run_sharded(call, Signature((letters, letters), (letters,), free, sums=((0,), (0,))))


RULES = [
    Rule(
        "along",
        ("gather.default",),
        "every dim; along the sharded one where less is asked for than gathering sends",
        "torch gathers the tensor, and pairs shards of dims that differ in length",
        gather,
    ),
]
