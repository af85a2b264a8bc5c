"""scatter, scatter_add and scatter_reduce along the sharded dim: each rank writes its own rows."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.along.gather_elements import gather_or_scatter
from holdfast.spmd.rules.indexing.row_writes import written_rows

LINEAR = ("sum",)  # reductions whose gradient is a single lookup


def scatter(call: Call) -> Any:
    """Run scatter, whose index names a row for each element."""
    if "reduce" in call.names and call["reduce"] not in LINEAR and _needs_gradient(call):
        return gather_or_scatter(call)
    answer = written_rows(call, by_element=True)
    return gather_or_scatter(call) if answer is None else answer


def _needs_gradient(call: Call) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in call.tensor_args())


SCATTERED = ("scatter{}.src", "scatter{}.value", "scatter_add{}.default", "scatter_reduce{}.two")


RULES = [
    Rule(
        "along",
        tuple(name.format(end) for name in SCATTERED for end in ("", "_")),
        "every dim where the sizes agree; along the sharded one if every rank has the indices and the values",
        "torch gathers the target, and pairs shards of dims that differ in length",
        scatter,
    ),
]
