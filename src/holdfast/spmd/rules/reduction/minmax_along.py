"""min and max along a sharded dim, with indices: each rank's extreme is gathered, the rows are not moved."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.rules.reduction.argmax import global_extreme
from holdfast.spmd.sharding.byte_costs import gathering_is_cheaper, is_sharded_along
from holdfast.spmd.sharding.reduced_result import reduced_dims, reduced_result
from holdfast.spmd.sharding.shard_sizes import sharded_axes

POSITION_BYTES = 8


def extreme_along(call: Call) -> Any:
    """Return the extreme along `dim` and its first index, as one device does."""
    tensor = call.values[0]
    over = reduced_dims([call["dim"]], tensor.ndim)
    if over is None or not is_sharded_along(tensor, over) or not _is_cheaper(tensor, over):
        return torch_2_11.extreme_along(call) if is_torch_2_11() else USE_TORCH
    axes = sharded_axes(tensor.placements, over)
    largest = call.op._schema.name.endswith("max")
    value, place = global_extreme(tensor, list(tensor.placements), axes, over[0], largest)
    return reduced_result(value, tensor, over, call["keepdim"]), reduced_result(place, tensor, over, call["keepdim"])


def _is_cheaper(tensor: DTensor, over: list[int]) -> bool:
    return gathering_is_cheaper(tensor, over, tensor.dtype.itemsize + POSITION_BYTES)


RULES = [
    Rule(
        "reduction",
        ("min.dim", "max.dim"),
        "every dim",
        "torch gathers the searched dim; torch 2.11 raises on ranks whose shard is shorter than others",
        extreme_along,
    ),
]
