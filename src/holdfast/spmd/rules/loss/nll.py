"""nll_loss over batch and class shards: class weights, own targets of each shard, targets out of range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base.call import ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_modes import assert_async, can_be_read
from holdfast.spmd.base.torch_specs import HALF_DTYPES, local_box, local_of
from holdfast.spmd.rules.loss.elementwise import MEAN, NONE, SUM
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.shard_sizes import is_shard, sharded_axes
from holdfast.spmd.sharding.signature import ChosenPlacements, Signature, run_sharded

IGNORED = -100


def _letters(call: Call) -> tuple[str, str, str]:
    """Return the letters of the input, of the target, and all free letters."""
    dims = call["self"].ndim
    if dims == 1:
        return "c", "", "c"
    spatial = "hw"[: dims - 2]
    return f"nc{spatial}", f"n{spatial}", f"nc{spatial}"


def forward(call: Call) -> Any:
    """Return the loss and the total weight; the mean needs one scalar reduced over the shards."""
    weights = _known_weights(call)
    call = _with_weight_on_classes(call)
    scores, target, free = _letters(call)
    inputs = (scores, target, "c") if call["weight"] is not None else (scores, target)
    none = call["reduction"] == NONE
    mean = call["reduction"] == MEAN  # only the mean reads the total weight: otherwise it may stay Partial
    signature = Signature(
        inputs, (target if none else "", ""), free, same=tuple((1, letter) for letter in free) if mean else ()
    )

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> Any:
        wrong = _out_of_range(tensors[1,], chosen.size("c"), call["ignore_index"])
        reports = mean and sharded_axes(chosen.inputs[1])  # the reduced total weight is NaN on every rank then
        if wrong.numel() and not reports:
            raise _refusal(wrong, chosen.size("c"), call["ignore_index"])
        own = {**tensors, (1,): _own_targets(chosen, tensors, call["ignore_index"])}
        if none:
            loss, weight = call.run(own, ignore_index=IGNORED)
            return loss, weight
        loss = _sum(call, own)
        weight = _weight(tensors, own[1,]).to(loss.dtype)
        if not mean:
            return loss.to(call["self"].dtype), weight.to(call["self"].dtype)
        axes = sharded_axes(chosen.inputs[0])
        if call["weight"] is None or weights is not None:  # every class shard can compute the total by itself
            weight = _total(tensors[1,], call["ignore_index"], chosen.size("c"), weights).to(loss.dtype)
            axes = sharded_axes(chosen.inputs[1])
        weight = all_reduce(weight * math.nan if wrong.numel() else weight, call.mesh, axes)
        if reports and can_be_read(weight) and bool(weight.isnan()):
            all_wrong = _out_of_range(full_tensor(call["target"]), chosen.size("c"), call["ignore_index"])
            if all_wrong.numel():  # else the class weights themselves are NaN
                raise _refusal(all_wrong, chosen.size("c"), call["ignore_index"])
        return (loss / weight).to(call["self"].dtype), weight.to(call["self"].dtype)

    return _run(call, signature, local)


def _known_weights(call: Call) -> torch.Tensor | None:
    """Return the weights of all classes if every rank has them."""
    weight = call["weight"]
    if isinstance(weight, DTensor):
        return local_of(weight) if all(place.is_replicate() for place in weight.placements) else None
    return weight  # type: ignore[no-any-return]


def _total(target: torch.Tensor, ignore: int, classes: int, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of all targets in range; the others are reported elsewhere."""
    valid = target != ignore
    if weights is None:
        return valid.sum()
    inside = valid & (target >= 0) & (target < classes)
    return torch.where(inside, weights[torch.where(inside, target, 0)], 0).sum()


def _sum(call: Call, tensors: dict[ArgSlot, torch.Tensor]) -> torch.Tensor:
    """Return the sum of this shard's losses; half precision is summed in float32, since it may overflow."""
    if call["self"].dtype not in HALF_DTYPES:
        return call.run(tensors, reduction=SUM, ignore_index=IGNORED)[0]  # type: ignore[no-any-return]
    return call.run(tensors, reduction=NONE, ignore_index=IGNORED)[0].float().sum()  # type: ignore[no-any-return]


def backward(call: Call) -> Any:
    """Return the gradient; each shard needs only its own targets."""
    if call["reduction"] != MEAN:
        one = torch.ones((), dtype=call["self"].dtype, device=call["self"].device)
        call = replace(call, values=(*call.values[:6], one))
    call = _with_weight_on_classes(call)
    scores, target, free = _letters(call)
    none = call["reduction"] == NONE
    inputs = (target if none else "", scores, target, *(["c"] if call["weight"] is not None else []), "")
    signature = Signature(inputs, (scores,), free)

    def local(chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor]) -> Any:
        own = {**tensors, (2,): _own_targets(chosen, tensors, call["ignore_index"], position=2)}
        if call["reduction"] != MEAN:
            return call.run(own, ignore_index=IGNORED)
        own[0,] = tensors[0,] / tensors[6,]
        return call.run(own, reduction=SUM, ignore_index=IGNORED)

    return run_sharded(call, signature, local)


def _with_weight_on_classes(call: Call) -> Call:
    """Redistribute the class weights, which are few, to the class shards of the scores."""
    scores, weight = call["self"], call["weight"]
    if not isinstance(weight, DTensor) or not isinstance(scores, DTensor):
        return call
    classes = min(1, scores.ndim - 1)
    places = [Shard(0) if is_shard(p) and p.dim == classes else Replicate() for p in scores.placements]
    weight = wrap(local_part(weight, places, call.mesh), call.mesh, places, weight.shape)
    values = list(call.values)
    values[call.names.index("weight")] = weight
    return replace(call, values=tuple(values))


def _own_targets(
    chosen: ChosenPlacements, tensors: dict[ArgSlot, torch.Tensor], ignore: int, position: int = 1
) -> torch.Tensor:
    """Return targets relative to this shard's first class; IGNORED if another shard has the class."""
    target = tensors[position,]
    scores = chosen.inputs[position - 1]
    letters = chosen.signature.inputs[position - 1]
    dim = letters.index("c")
    classes = chosen.size("c")
    valid = target != ignore
    if can_be_read(target):
        valid &= (target >= 0) & (target < classes)
    if not any(is_shard(placement) and placement.dim == dim for placement in scores):
        return torch.where(valid, target, IGNORED)
    shape = [chosen.size(letter) for letter in letters]
    sizes, offsets = local_box(shape, chosen.call.mesh, scores)
    if not can_be_read(target):  # no shard has such a class, so no kernel would check
        assert_async(~valid | ((target >= 0) & (target < classes)), "a target is out of bounds")
    inside = valid & (target >= offsets[dim]) & (target < offsets[dim] + sizes[dim])
    return torch.where(inside, target - offsets[dim], IGNORED)


def _out_of_range(target: torch.Tensor, classes: int, ignore: int) -> torch.Tensor:
    """Return the targets without a class; on a GPU the kernels check, later and without waiting."""
    if not can_be_read(target):
        return target.new_empty(0)
    return target[(target != ignore) & ((target < 0) | (target >= classes))]


def _refusal(wrong: torch.Tensor, classes: int, ignore: int) -> IndexError:
    return IndexError(
        f"Target {int(wrong[0])} is out of bounds: expected 0 to {classes - 1} or {ignore} (ignore_index)"
    )


def _weight(tensors: dict[ArgSlot, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Return the weight of all targets that this shard counts."""
    counted = target != IGNORED
    scores = tensors[0,]
    if (2,) in tensors:
        weights = tensors[2,][target.where(counted, 0)]  # a trace knows no number of counted targets
        return weights.where(counted, 0).sum()
    return counted.sum().to(scores.dtype)


def _run(call: Call, signature: Signature, local: Any) -> Any:
    return run_sharded(call, signature, local, skip_empty=False)


WHY = "torch divides each shard by its own weight, gathers the classes, and refuses uneven batches"
RULES = [
    Rule("loss", ("nll_loss_forward.default", "nll_loss2d_forward.default"), "batch, classes, space", WHY, forward),
    Rule("loss", ("nll_loss_backward.default", "nll_loss2d_backward.default"), "batch, classes, space", WHY, backward),
]
