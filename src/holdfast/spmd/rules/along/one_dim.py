"""sort, unfold, linalg.cross and renorm on shards; `along`, the rule of operators that work along one dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.shard_sizes import is_shard
from holdfast.spmd.sharding.signature import (
    FIXED,
    LETTERS,
    Signature,
    broadcast_signature,
    run_sharded,
)


def letters_except(dims: int, fixed: int) -> str:
    return "".join(FIXED if dim == fixed else LETTERS[dim] for dim in range(dims))


def along(results: int = 1) -> Callable[[Call], Any]:
    """Return a rule for tensors and results that have equal sizes except along `dim`."""

    def run(call: Call) -> Any:
        tensors = [tensor for _, tensor in call.tensor_args()]
        first = tensors[0]
        if not first.ndim or not any(isinstance(t, DTensor) and _shards(t) for t in tensors):
            return USE_TORCH
        dim = call["dim" if "dim" in call.names else "dimension"] % first.ndim
        letters = letters_except(first.ndim, dim)
        for tensor in tensors:
            if tensor.ndim != first.ndim or any(
                tensor.shape[d] != first.shape[d] for d in range(first.ndim) if d != dim
            ):
                return USE_TORCH
        free = letters.replace(FIXED, "")
        return run_sharded(call, Signature((letters,) * len(tensors), (letters,) * results, free))

    return run


def cross(call: Call) -> Any:
    """Run linalg.cross of tensors that broadcast together."""
    first, second = call.values[:2]
    if first.shape == second.shape or first.ndim != second.ndim:
        return USE_TORCH
    common = broadcast_signature(call, 1)
    along_dim = common.outputs[0][call["dim"] % first.ndim]
    inputs = tuple(letters.replace(along_dim, FIXED) for letters in common.inputs)
    output, free = common.outputs[0].replace(along_dim, FIXED), common.free.replace(along_dim, "")
    return run_sharded(call, Signature(inputs, (output,), free))


def renorm(call: Call) -> Any:
    """Run renorm: each slice along `dim` is independent."""
    tensor = call.values[0]
    dim = call["dim"] % tensor.ndim
    letters = "".join("n" if d == dim else FIXED for d in range(tensor.ndim))
    return run_sharded(call, Signature((letters,), (letters,), "n"))


def when_empty(call: Call) -> Any:
    """Keep shards if some shard is empty and a dim other than `dim` is sharded."""
    dim = call["dim"] % max(call.values[0].ndim, 1)
    kept = any(
        is_shard(place) and place.dim != dim
        for _, tensor in call.tensor_args()
        if isinstance(tensor, DTensor)
        for place in tensor.placements
    )
    return along(len(call.op._schema.returns))(call) if kept and has_empty_input(call) else USE_TORCH


def _shards(tensor: DTensor) -> bool:
    return any(is_shard(place) for place in tensor.placements)


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
        cross,
    ),
    Rule("along", ("renorm.default",), "the dim `dim`", "torch has no strategy", renorm),
]
