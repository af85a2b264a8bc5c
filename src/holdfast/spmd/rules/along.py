"""Operators that work along one dim: every other dim may be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.call import LEAVE, Call, is_shard
from holdfast.spmd.empties import has_empty
from holdfast.spmd.registry import Rule
from holdfast.spmd.rules.pointwise import LETTERS
from holdfast.spmd.ways import FIXED, Signature, run_sharded


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
    """gather: as `along`, and where each rank has all that is looked into, the indices may be cut along `dim` too."""
    looked_into, index = call.values[0], call["index"]
    if not has_empty(call) or looked_into.ndim != index.ndim or not index.ndim:
        return LEAVE
    dim = call["dim"] % index.ndim
    if any(looked_into.shape[d] != index.shape[d] for d in range(index.ndim) if d != dim):
        return LEAVE
    letters = _letters(index.ndim, dim)
    asked = letters.replace(FIXED, "z")
    return run_sharded(call, Signature((letters, asked), (asked,), asked))


def slices(call: Call) -> Any:
    """renorm: each slice along `dim` by itself."""
    tensor = call.values[0]
    dim = call["dim"] % tensor.ndim
    letters = "".join("n" if d == dim else FIXED for d in range(tensor.ndim))
    return run_sharded(call, Signature((letters,), (letters,), "n"))


def _when_empty(call: Call) -> Any:
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


RULES = [
    Rule(
        "along",
        ("scatter_reduce.two", "unfold.default"),
        "every dim but `dim`, where the sizes agree",
        "torch has no strategy, or gathers when rows are fewer than ranks",
        along(),
    ),
    Rule(
        "along",
        ("scatter_add.default", "sort.default", "sort.stable", "topk.default"),
        "every dim but `dim`, where the sizes agree",
        "torch gathers when rows are fewer than ranks",
        _when_empty,
    ),
    Rule(
        "along",
        ("gather.default",),
        "every dim but `dim`, where the sizes agree; `dim` of the indices",
        "torch gathers when rows are fewer than ranks",
        look_up,
    ),
    Rule("along", ("renorm.default",), "the dim `dim`", "torch has no strategy", slices),
]
