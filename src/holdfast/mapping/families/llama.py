"""Llama: q, k, v and gate, up apart; biases and a head of its own where the config says so."""

from holdfast.mapping.families import dense
from holdfast.mapping.families.family import Family
from holdfast.mapping.families.layers import all_dense

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LlamaModel"),
    programs={
        "fused": dense.FUSED,
        "fused-grouped": dense.FUSED_GROUPED,
        "megatron": dense.MEGATRON,
        "megatron-local": dense.MEGATRON_LOCAL,
        "megatron-dist": dense.MEGATRON_DIST,
        "paddle": dense.PADDLE,
    },
    blocks=all_dense,
)
