"""prod along a dim, as torch does it: its gradient formula makes plain tensors, which are accepted."""

from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.plain_tensors import PLAIN_IN_GRADIENT, with_plain_gradients

RULES = [Rule("reduction", ("prod.dim_int",), "as torch", PLAIN_IN_GRADIENT, with_plain_gradients("cat.default"))]
