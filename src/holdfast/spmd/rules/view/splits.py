"""split and unbind, of whose results only some may be used: the gradients of the others are plain zeros."""

from __future__ import annotations

from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.plain_tensors import PLAIN_IN_GRADIENT, with_plain_gradients

RULES = [
    Rule(
        "view",
        ("split.Tensor", "split_with_sizes.default", "unbind.int"),
        "as torch",
        PLAIN_IN_GRADIENT,
        with_plain_gradients("cat.default", "stack.default"),
    )
]
