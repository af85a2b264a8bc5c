"""Qwen3-MoE: Qwen3's attention, with experts in all or most layers."""

from holdfast.mapping.families import moe
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layers import qwen_moe
from holdfast.mapping.families.statements import MEGATRON_DIST_QK_NORMS, MEGATRON_QK_NORMS

QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    programs={
        "fused": moe.FUSED,
        "fused-grouped": moe.FUSED_GROUPED,
        "stacked": moe.STACKED,
        "megatron": moe.MEGATRON + MEGATRON_QK_NORMS,
        "megatron-local": moe.MEGATRON_LOCAL + MEGATRON_QK_NORMS,
        "megatron-dist": moe.MEGATRON_DIST + MEGATRON_DIST_QK_NORMS,
        "megatron-dist-layers": moe.MEGATRON_DIST_LAYERS + MEGATRON_QK_NORMS,
        "paddle": moe.PADDLE,
        "paddle-fused": moe.PADDLE_FUSED,
    },
    blocks=qwen_moe,
)
