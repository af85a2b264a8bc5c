"""index_add, index_copy, index_fill and scatter along the sharded dim: each rank writes the rows that are its own.

Every rank must have the indices and what is written; then nothing is sent. What is meant for other ranks' rows goes
into a spare row, which is cut off again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, Spot, is_shard, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.rules.along.one_dim import picked
from holdfast.spmd.rules.indexing.bounds import is_everywhere, is_in_range
from holdfast.spmd.rules.pointwise.pointwise import LETTERS
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.index_checks import asked_of
from holdfast.spmd.sharding.signature import FIXED, Chosen, Signature, run_sharded

LINEAR = ("sum",)  # the ways to reduce whose gradient looks up once, as the others do not


def rows(call: Call) -> Any:
    """index_add, index_copy, index_fill: a list of rows."""
    answer = _written(call, by_element=False)
    if answer is not None:
        return answer
    if has_empty(call) and (signature := _slices(call)) is not None:
        return run_sharded(call, signature, _on_slices, skip_empty=False)
    is_wrong = private.is_oldest() and not call.is_inplace and "source" in call.names
    return torch_2_11.whole_if_placed(call) if is_wrong else LEAVE


def _slices(call: Call) -> Signature | None:
    """The letters of rows added to a copy, where other dims are cut into more shards than rows: torch gathers them."""
    target, index = call.values[0], call["index"]
    if call.is_inplace or "source" not in call.names or not target.ndim or index.ndim != 1:
        return None
    dim, source = call["dim"] % target.ndim, call["source"]
    if source.ndim != target.ndim or any(_differ(source, target, d) for d in range(target.ndim) if d != dim):
        return None
    letters = "".join(FIXED if d == dim else LETTERS[d] for d in range(target.ndim))
    if not any(is_shard(p) and p.dim != dim for t in (target, source) if isinstance(t, DTensor) for p in t.placements):
        return None
    return Signature((letters, FIXED, letters), (letters,), letters.replace(FIXED, ""))


def _on_slices(chosen: Chosen, tensors: dict[Spot, torch.Tensor]) -> Any:
    """On a rank that has nothing too: what is wrong with an index, which every rank now has, must raise on all."""
    call, (_, index, _) = chosen.call, tensors.values()
    ask = asked_of(call)[0]
    return call.run(tensors) if is_in_range(index, ask.first, ask.last) else gather_and_run(call)


def elements(call: Call) -> Any:
    """scatter: a row for each element."""
    if "reduce" in call.names and call["reduce"] not in LINEAR and _needs_gradient(call):
        return picked(call)
    answer = _written(call, by_element=True)
    return picked(call) if answer is None else answer


def _needs_gradient(call: Call) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in call.spots())


def _written(call: Call, *, by_element: bool) -> Any:
    """The result, of which each rank has its rows; None where something would have to be sent first."""
    target = call.values[0]
    if not isinstance(target, DTensor) or not target.ndim:
        return None
    dim = call["dim"] % target.ndim
    if Shard(dim) not in target.placements or not _lies_well(call, dim, by_element):
        return None
    ask = asked_of(call)[0]
    index = moved(ask.index, [Replicate()] * call.mesh.ndim, call.mesh)
    if not is_in_range(index, ask.first, ask.last):
        return None  # the common way raises
    sizes, offsets = private.local_box(target.shape, call.mesh, target.placements)
    place = torch.where(index < 0, index + target.shape[dim], index) - offsets[dim]
    place = torch.where((place >= 0) & (place < sizes[dim]), place, sizes[dim])
    local = private.local_of(target)
    tensors: dict[Spot, torch.Tensor] = {(0,): _with_spare(local, dim)}
    for spot, tensor in list(call.spots())[1:]:
        given = place if tensor is call["index"] else tensor
        tensors[spot] = moved(given, _beside(target, given, dim, by_element), call.mesh)
    result = call.run(tensors).narrow(dim, 0, sizes[dim])
    if call.is_inplace:
        local.copy_(result)
        return target
    return wrap(result, call.mesh, target.placements, target.shape)


def _lies_well(call: Call, dim: int, by_element: bool) -> bool:
    """Whether there are no Partials, every rank has the indices, and what is written is whole or cut as the target."""
    target, index = call.values[0], call["index"]
    if not all(is_shard(place) or place.is_replicate() for place in target.placements) or not is_everywhere(index):
        return False
    cut = [place.dim for place in target.placements if is_shard(place) and place.dim != dim]
    for _, tensor in list(call.spots())[1:]:
        rowwise = tensor is not index or by_element
        if rowwise and tensor.ndim and any(_differ(tensor, target, other) for other in cut):
            return False
        wanted = _beside(target, tensor, dim, by_element)
        present = tensor.placements if isinstance(tensor, DTensor) else wanted
        if any(here != there and not here.is_replicate() for here, there in zip(present, wanted, strict=True)):
            return False
    return True


def _differ(tensor: Any, target: DTensor, dim: int) -> bool:
    return bool(tensor.ndim != target.ndim or tensor.shape[dim] != target.shape[dim])


def _beside(target: DTensor, tensor: Any, dim: int, by_element: bool) -> list[Placement]:
    """Cut along the other dims as the target is, but for a number and a list of rows."""
    if tensor.ndim != target.ndim or (tensor.ndim == 1 and not by_element):
        return [Replicate()] * len(target.placements)
    return [place if is_shard(place) and place.dim != dim else Replicate() for place in target.placements]


def _with_spare(local: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = 1
    return torch.cat([local, local.new_zeros(shape)], dim)


LISTED = ("index_add", "index_copy")
FILLED = ("index_fill.int_Scalar", "index_fill.int_Tensor", "index_fill_.int_Scalar", "index_fill_.int_Tensor")
SCATTERED = ("scatter{}.src", "scatter{}.value", "scatter_add{}.default", "scatter_reduce{}.two")
RULES = [
    Rule(
        "indexing",
        (*(f"{name}{end}.default" for name in LISTED for end in ("", "_")), *FILLED),
        "every dim; along the sharded one where every rank has the indices and what is written",
        "torch gathers what is written into, and raises for plain indices",
        rows,
    ),
    Rule(
        "along",
        tuple(name.format(end) for name in SCATTERED for end in ("", "_")),
        "every dim where the sizes agree; along the sharded one where every rank has the indices and what is written",
        "torch gathers what is written into, and pairs shards of dims that differ in length",
        elements,
    ),
]
