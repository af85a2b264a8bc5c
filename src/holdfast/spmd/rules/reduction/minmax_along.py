"""min and max along a sharded dim, with their positions: each rank's best is gathered, the rows stay where they are."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.rules.reduction.argmax import best_of_all
from holdfast.spmd.sharding.byte_costs import gathering_pays, is_cut
from holdfast.spmd.sharding.mesh_collectives import sharded_axes
from holdfast.spmd.sharding.reduced_result import named_dims, shrunk

POSITION_BYTES = 8


def best_along(call: Call) -> Any:
    """The extreme along `dim` and the first place that has it, as one device finds them."""
    tensor = call.values[0]
    over = named_dims([call["dim"]], tensor.ndim)
    if over is None or not is_cut(tensor, over) or not _pays(tensor, over):
        return torch_2_11.extreme_along(call) if private.is_oldest() else LEAVE
    axes = sharded_axes(tensor.placements, over)
    largest = call.op._schema.name.endswith("max")
    value, place = best_of_all(tensor, list(tensor.placements), axes, over[0], largest)
    return shrunk(value, tensor, over, call["keepdim"]), shrunk(place, tensor, over, call["keepdim"])


def _pays(tensor: DTensor, over: list[int]) -> bool:
    return gathering_pays(tensor, over, tensor.dtype.itemsize + POSITION_BYTES)


RULES = [
    Rule(
        "reduction",
        ("min.dim", "max.dim"),
        "every dim",
        "torch gathers the searched dim; torch 2.11 raises on ranks whose shard is shorter than others",
        best_along,
    ),
]
