"""Qwen3 programs: like Llama, with norms on the heads of q and k."""

from holdfast.mapping.families import dense
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import all_dense
from holdfast.mapping.families.statements import MEGATRON_DIST_QK_NORMS, MEGATRON_QK_NORMS

QWEN3 = ModelFamily(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    programs={
        "fused": dense.FUSED,
        "fused-grouped": dense.FUSED_GROUPED,
        "megatron": dense.MEGATRON + MEGATRON_QK_NORMS,
        "megatron-local": dense.MEGATRON_LOCAL + MEGATRON_QK_NORMS,
        "megatron-dist": dense.MEGATRON_DIST + MEGATRON_DIST_QK_NORMS,
        "paddle": dense.PADDLE,
        "paddle-fused": dense.PADDLE_FUSED,
    },
    blocks=all_dense,
)
