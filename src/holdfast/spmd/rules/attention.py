"""Attention on the CPU: batch and heads."""

from __future__ import annotations

from typing import Any

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, wrap
from holdfast.spmd.registry import Rule
from holdfast.spmd.ways import FIXED, Signature, run_sharded


def attention(call: Call) -> Any:
    """Queries, keys, values, and in the backward pass what goes with them: all by batch and head."""
    tensors = [tensor for _, tensor in call.spots()]
    if tensors[0].ndim != 4:
        return LEAVE
    inputs = []
    mask = call["attn_mask"]
    for tensor in tensors:
        letters = ("nt" if _heads_divide(call) else f"n{FIXED}") + FIXED * (tensor.ndim - 2)
        if tensor is mask:
            letters = FIXED * tensor.ndim if tensor.ndim < 4 else letters
            letters = "".join(
                FIXED if size == 1 else letter for letter, size in zip(letters, tensor.shape, strict=True)
            )
        inputs.append(letters)
    results = run_sharded(call, Signature(tuple(inputs), ("nt",) * len(call.op._schema.returns), "nt"))
    if len(results) == 2:
        return results
    grouped = (call["query"], call["key"], call["value"])  # keys and values may have fewer heads than queries
    return tuple(
        wrap(private.local_of(result), call.mesh, result.placements, tensor.shape)
        for result, tensor in zip(results, grouped, strict=True)
    )


def _heads_divide(call: Call) -> bool:
    """Whether queries and the keys that they share come to the same ranks, where there are fewer keys."""
    queries, keys = call["query"].shape[1], call["key"].shape[1]
    return queries == keys or all(keys % size == 0 for size in call.mesh.shape)


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
