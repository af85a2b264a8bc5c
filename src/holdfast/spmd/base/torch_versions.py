"""The torch versions that are known, imports of torch's private names, and why no rule can be installed.

DTensor's dispatch on a version outside `KNOWN` is unknown: `unsupported_reason` says so, and `enable` then installs
nothing. On a known version an operator that is missing leaves out that operator's rule only.
"""

from __future__ import annotations

import torch

from holdfast.spmd.base.private_names import RULES, mismatches

try:
    from torch._C._dynamo import eval_frame
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.distributed._functional_collectives import _are_we_tracing
    from torch.distributed.tensor import _api as dtensor_api
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._ops import _matrix_ops, utils
    from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
    from torch.distributed.tensor._redistribute import redistribute_local_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.distributed.tensor.parallel import loss as loss_module
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, guard_or_false
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._pytree import tree_leaves, tree_unflatten
except ImportError as error:
    MISSING = f"torch {torch.__version__} lacks what holdfast.spmd builds on: {error}"
else:
    MISSING = ""

    class UncachedSpec(DTensorSpec):
        """A spec that equals only itself, so that no cached decision matches it."""

        def __eq__(self, other: object, /) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)


__all__ = [
    "AT_LEAST_2_13",
    "KNOWN",
    "MISSING",
    "DTensorSpec",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "NormPartial",
    "OutputSharding",
    "TensorMeta",
    "UncachedSpec",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "_are_we_tracing",
    "_clear_sharding_prop_cache",
    "_matrix_ops",
    "compute_local_shape_and_global_offset",
    "dtensor_api",
    "eval_frame",
    "guard_or_false",
    "is_torch_2_11",
    "loss_module",
    "no_dispatch",
    "redistribute_local_tensor",
    "tree_leaves",
    "tree_unflatten",
    "unsupported_reason",
    "utils",
]

KNOWN = ("2.11", "2.12", "2.13")
VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
AT_LEAST_2_13 = VERSION >= (2, 13)


def is_torch_2_11() -> bool:
    """Return True on torch 2.11, which ignores subclasses of DTensor and has rules that were fixed later."""
    return torch.__version__.startswith("2.11")


def unsupported_reason() -> str | None:
    """Return why no rule can be installed on this torch, or None."""
    if MISSING:
        return MISSING
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in KNOWN:
        return f"torch {version} is not known to holdfast.spmd (known: {', '.join(KNOWN)}): no rule is installed"
    problems = "; ".join(mismatches().get(RULES, ()))
    return f"torch {torch.__version__} is not as expected: {problems}: no rule is installed" if problems else None
