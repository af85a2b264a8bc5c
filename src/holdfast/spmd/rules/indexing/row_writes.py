"""index_add, index_copy and index_fill along the sharded dim: each rank writes its own rows.

If every rank has the indices and the values, nothing is sent. Values for other ranks' rows go into a spare row, which
is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_box, local_of
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.index_checks import index_bounds, is_in_range, is_replicated
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import FIXED, LETTERS, ChosenPlacements, Signature, run_sharded


def write_rows(call: Call) -> Any:
    """Run index_add, index_copy or index_fill, whose index is a list of rows."""
    answer = written_rows(call, by_element=False)
    if answer is not None:
        return answer
    if has_empty_input(call) and (signature := _slices(call)) is not None:
        return run_sharded(call, signature, _on_slices, skip_empty=False)
    is_wrong = is_torch_2_11() and not call.is_inplace and "source" in call.names
    return torch_2_11.gather_if_sharded(call) if is_wrong else USE_TORCH


def _slices(call: Call) -> Signature | None:
    """Return the signature of rows added to a copy if other dims have more shards than rows, which torch gathers."""
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


def _on_slices(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> Any:
    """Run on every rank, also with an empty shard: an invalid index, which every rank has, must raise on all."""
    call, (_, index, _) = chosen.call, tensors.values()
    bounds = index_bounds(call)[0]
    return call.run(tensors) if is_in_range(index, bounds.first, bounds.last) else gather_and_run(call)


def written_rows(call: Call, *, by_element: bool) -> Any:
    """Return the result, of which each rank has its rows; None if something would have to be sent first."""
    target = call.values[0]
    if not isinstance(target, DTensor) or not target.ndim:
        return None
    dim = call["dim"] % target.ndim
    if Shard(dim) not in target.placements or not _needs_no_communication(call, dim, by_element):
        return None
    bounds = index_bounds(call)[0]
    index = local_part(bounds.index, [Replicate()] * call.mesh.ndim, call.mesh)
    if not is_in_range(index, bounds.first, bounds.last):
        return None  # the default path raises
    sizes, offsets = local_box(target.shape, call.mesh, target.placements)
    place = torch.where(index < 0, index + target.shape[dim], index) - offsets[dim]
    place = torch.where((place >= 0) & (place < sizes[dim]), place, sizes[dim])
    local = local_of(target)
    tensors: dict[ArgSlot, torch.Tensor] = {(0,): _with_spare(local, dim)}
    for slot, tensor in list(call.tensor_args())[1:]:
        value = place if tensor is call["index"] else tensor
        tensors[slot] = local_part(value, _placements_for(target, value, dim, by_element), call.mesh)
    result = call.run(tensors).narrow(dim, 0, sizes[dim])
    if call.is_inplace:
        local.copy_(result)
        return target
    return wrap(result, call.mesh, target.placements, target.shape)


def _needs_no_communication(call: Call, dim: int, by_element: bool) -> bool:
    """Return True if nothing is Partial, indices are replicated, and values are whole or sharded as the target."""
    target, index = call.values[0], call["index"]
    if not all(is_shard(place) or place.is_replicate() for place in target.placements) or not is_replicated(index):
        return False
    sharded = [place.dim for place in target.placements if is_shard(place) and place.dim != dim]
    for _, tensor in list(call.tensor_args())[1:]:
        rowwise = tensor is not index or by_element
        if rowwise and tensor.ndim and any(_differ(tensor, target, other) for other in sharded):
            return False
        wanted = _placements_for(target, tensor, dim, by_element)
        present = tensor.placements if isinstance(tensor, DTensor) else wanted
        if any(here != there and not here.is_replicate() for here, there in zip(present, wanted, strict=True)):
            return False
    return True


def _differ(tensor: Any, target: DTensor, dim: int) -> bool:
    return bool(tensor.ndim != target.ndim or tensor.shape[dim] != target.shape[dim])


def _placements_for(target: DTensor, tensor: Any, dim: int, by_element: bool) -> list[Placement]:
    """Return placements sharded along the other dims as the target is; replicated for scalars and lists of rows."""
    if tensor.ndim != target.ndim or (tensor.ndim == 1 and not by_element):
        return [Replicate()] * len(target.placements)
    return [place if is_shard(place) and place.dim != dim else Replicate() for place in target.placements]


def _with_spare(local: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = 1
    return torch.cat([local, local.new_zeros(shape)], dim)


LISTED = ("index_add", "index_copy")
FILLED = ("index_fill.int_Scalar", "index_fill.int_Tensor", "index_fill_.int_Scalar", "index_fill_.int_Tensor")
RULES = [
    Rule(
        "indexing",
        (*(f"{name}{end}.default" for name in LISTED for end in ("", "_")), *FILLED),
        "every dim; along the sharded one if every rank has the indices and the values",
        "torch gathers the target, and raises for plain indices",
        write_rows,
    ),
]
