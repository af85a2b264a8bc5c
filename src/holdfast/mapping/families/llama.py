"""Llama programs: separate q, k, v and gate, up; biases and an untied head depend on the config."""

from holdfast.mapping.families import dense
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import all_dense

LLAMA = ModelFamily(
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
