"""Qwen2 programs: like Llama, with biases on q, k and v."""

from holdfast.mapping.families import dense
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import all_dense

QWEN2 = ModelFamily(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    programs={
        "fused": dense.FUSED,
        "fused-grouped": dense.FUSED_GROUPED,
        "megatron": dense.MEGATRON,
        "megatron-local": dense.MEGATRON_LOCAL,
        "megatron-dist": dense.MEGATRON_DIST,
        "paddle": dense.PADDLE,
        "paddle-fused": dense.PADDLE_FUSED,
    },
    blocks=all_dense,
)
