"""Qwen3-MoE programs: Qwen3's attention, with experts in all or most layers."""

from holdfast.mapping.families import expert_programs
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import qwen_moe
from holdfast.mapping.families.statements import MEGATRON_DIST_QK_NORMS, MEGATRON_QK_NORMS

QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    programs={
        "fused": expert_programs.FUSED,
        "fused-grouped": expert_programs.FUSED_GROUPED,
        "stacked": expert_programs.STACKED,
        "megatron": expert_programs.MEGATRON + MEGATRON_QK_NORMS,
        "megatron-local": expert_programs.MEGATRON_LOCAL + MEGATRON_QK_NORMS,
        "megatron-dist": expert_programs.MEGATRON_DIST + MEGATRON_DIST_QK_NORMS,
        "megatron-dist-layers": expert_programs.MEGATRON_DIST_LAYERS + MEGATRON_QK_NORMS,
        "paddle": expert_programs.PADDLE,
        "paddle-fused": expert_programs.PADDLE_FUSED,
    },
    blocks=qwen_moe,
)
