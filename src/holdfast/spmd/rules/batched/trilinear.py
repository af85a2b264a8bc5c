"""`torch._trilinear`, from which `F.bilinear` and its gradients are made: the sum of a product of three tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.signature import LETTERS, Signature, run_sharded


def trilinear(call: Call) -> Any:
    """Shard any dim of the product; a summed dim leaves partial sums."""
    tensors = [call["i1"], call["i2"], call["i3"]]
    added = [call["expand1"], call["expand2"], call["expand3"]]
    dims = tensors[0].ndim + len(added[0])
    inputs = tuple(map(_letters, [dims] * 3, added))
    output = _letters(dims, call["sumdim"])
    return run_sharded(call, Signature(inputs, (output,), "".join(sorted({*"".join(inputs)}))))


def _letters(dims: int, without: Sequence[int]) -> str:
    """Return a letter for each dim of the product except those that a tensor lacks."""
    return "".join(LETTERS[dim] for dim in range(dims) if dim not in without)


RULES = [
    Rule("batched", ("_trilinear.default",), "every dim of the product", "torch has no strategy", trilinear),
]
