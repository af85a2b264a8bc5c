"""Comparisons, sign, isnan, pow, reciprocal, division: a Partial is reduced first, and always in the same way.

The same way, because a comparison of a tensor with its own maximum must see the same rounding twice.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.mixed_placements import torch_aligns
from holdfast.spmd.sharding.partials import is_partial, on_reduced_alike, reduce_partials


def on_reduced(call: Call) -> Any:
    """Reduce Partials, and call again; with other shards torch reduces straight into those."""
    has_partials = any(is_partial(tensor) for _, tensor in call.tensor_args())
    return on_reduced_alike(call) if has_partials and not torch_aligns(call) else USE_TORCH


def on_reduced_unless_sum(call: Call) -> Any:
    """Do as `on_reduced`, but leave sums to newer torch, which shards them to match later operands."""
    partials = {
        place for _, t in call.tensor_args() if isinstance(t, DTensor) for place in t.placements if place.is_partial()
    }
    return USE_TORCH if torch_versions.AT_LEAST_2_13 and partials == {Partial()} else on_reduced(call)


def on_reduced_divisor(call: Call) -> Any:
    """Reduce the divisor; the dividend may stay Partial."""
    above, below = call.values[:2]
    if not isinstance(below, DTensor) or not any(isinstance(place, Partial) for place in below.placements):
        return USE_TORCH
    return apply(call.op, [above, reduce_partials(below), *call.values[2:]])


COMPARISONS = tuple(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar"))
OTHERS = (
    *("reciprocal.default", "lerp.Tensor", "addcdiv.default", "sign.default", "isnan.default"),
    *("isinf.default", "signbit.default", "logical_not.default", "bitwise_not.default", "threshold.default"),
)
OF_A_SUM = ("sgn.default", "pow.Tensor_Scalar")

RULES = [
    Rule(
        "pointwise",
        COMPARISONS + OTHERS,
        "every dim; a Partial is reduced first",
        "torch compares or inverts each rank's part of a Partial in some of these",
        on_reduced,
    ),
    Rule(
        "pointwise",
        OF_A_SUM,
        "every dim; a Partial is reduced first",
        "torch applies these to each rank's part of a Partial that is not a sum",
        on_reduced_unless_sum,
    ),
]
if not torch_versions.AT_LEAST_2_13:
    RULES.append(
        Rule(
            "pointwise",
            ("div.Tensor", "div.Tensor_mode"),
            "every dim; a Partial that is divided by is reduced first",
            "torch divides by each rank's part",
            on_reduced_divisor,
        )
    )
