"""scatter, scatter_add and scatter_reduce along the sharded dim: each rank writes its own rows; index_reduce."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.along.gather_elements import gather_or_scatter
from holdfast.spmd.rules.indexing.row_writes import written_rows
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.partials import is_partial

LINEAR = ("sum",)  # reductions whose gradient is a single lookup


def scatter(call: Call) -> Any:
    """Run scatter, whose index names a row for each element."""
    if "reduce" in call.names and call["reduce"] not in LINEAR and _needs_gradient(call):
        answer = gather_partials(call)
        return gather_or_scatter(call) if answer is USE_TORCH else answer
    answer = written_rows(call, by_element=True)
    return gather_or_scatter(call) if answer is None else answer


def gather_partials(call: Call) -> Any:
    """Gather if an input is Partial: the gradient compares the inputs with the result, which must be rounded alike."""
    return gather_and_run(call) if any(is_partial(tensor) for _, tensor in call.tensor_args()) else USE_TORCH


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
    Rule(
        "along",
        ("index_reduce.default",),
        "as torch; a Partial is gathered",
        "the gradient compares a Partial with the result, which torch rounds differently",
        gather_partials,
    ),
]
