"""Scaled dot product attention on the CPU, forward and backward: batch and heads may be sharded."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.signature import FIXED, Signature, choose, run_sharded


def attention(call: Call) -> Any:
    """Run forward or backward of attention by batch and head."""
    if next(call.tensor_args())[1].ndim != 4:
        return USE_TORCH
    signature = _signature(call, "nt")
    if call["query"].shape[1] != call["key"].shape[1] and not _heads_divide(call, signature):
        signature = _signature(call, "n")
    results = run_sharded(call, signature)
    if len(results) == 2:
        return results
    grouped = (call["query"], call["key"], call["value"])  # keys and values may have fewer heads than queries
    return tuple(
        wrap(local_of(result), call.mesh, result.placements, tensor.shape)
        for result, tensor in zip(results, grouped, strict=True)
    )


def _signature(call: Call, free: str) -> Signature:
    inputs = []
    whole = "".join(letter if letter in free else FIXED for letter in "nt")
    for _, tensor in call.tensor_args():
        letters = whole + FIXED * (tensor.ndim - 2)
        if tensor is call["attn_mask"]:
            letters = FIXED * tensor.ndim if tensor.ndim < 4 else letters
            letters = "".join(
                FIXED if size == 1 else letter for letter, size in zip(letters, tensor.shape, strict=True)
            )
        inputs.append(letters)
    return Signature(tuple(inputs), (whole,) * len(call.op._schema.returns), free)


def _heads_divide(call: Call, signature: Signature) -> bool:
    """Return True if queries and the keys that they share fall on the same ranks (grouped-query attention)."""
    places = choose(call, signature).inputs[0]
    ranks = math.prod(call.mesh.size(axis) for axis, place in enumerate(places) if place == Shard(1))
    return bool(call["key"].shape[1] % ranks == 0)


RULES = [
    Rule(
        "attention",
        (
            "_scaled_dot_product_flash_attention_for_cpu.default",
            "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        ),
        "batch and heads",
        "torch has no strategy for the kernel that CPUs use, or takes minutes to find one",
        attention,
    ),
]
