"""Gradient formulas that put what DTensor's dispatcher refuses beside a DTensor: a plain tensor, a complex number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.spmd.base.call import LEAVE, Call, Run
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.pointwise.pointwise import pointwise
from holdfast.spmd.rules.scan.negative_dim import EVERY_OTHER, from_the_front
from holdfast.spmd.sharding.plain_tensors import demand


def _demanding(*names: str, run: Run = lambda _: LEAVE) -> Callable[[Call], Any]:
    """A rule that also has the gradient's operators taken over."""

    def prepare(call: Call) -> Any:
        demand(*names)
        return run(call)

    return prepare


WHY = "torch's gradient formula makes a plain tensor, which its dispatcher then refuses beside a DTensor"
COMPLEX = "torch has no strategy, and cannot hash the complex number in the gradient formula"
RULES = [
    Rule("reduction", ("prod.dim_int",), "as torch", WHY, _demanding("cat.default")),
    Rule("scan", ("cumprod.default",), EVERY_OTHER, WHY, _demanding("where.self", "cat.default", run=from_the_front)),
    Rule("scan", ("cumprod_.default",), "as torch", WHY, _demanding("where.self", "cat.default")),
    Rule("pointwise", ("polar.default",), "every dim", COMPLEX, _demanding("mul.Scalar", run=pointwise)),
]
