"""Mixtral programs: experts in all layers, with their own names (w1 is gate, w3 is up, w2 is down)."""

from holdfast.mapping.families import expert_programs
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import all_moe

_NAMES = """
{layer}.block_sparse_moe.gate.weight -> {layer}.mlp.gate.weight
{layer}.block_sparse_moe.experts.$EXPERT_ID.w1.weight -> {layer}.mlp.experts.$EXPERT_ID.gate_proj.weight
{layer}.block_sparse_moe.experts.$EXPERT_ID.w3.weight -> {layer}.mlp.experts.$EXPERT_ID.up_proj.weight
{layer}.block_sparse_moe.experts.$EXPERT_ID.w2.weight -> {layer}.mlp.experts.$EXPERT_ID.down_proj.weight
"""

MIXTRAL = ModelFamily(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM", "MixtralModel"),
    programs={
        "fused": _NAMES + expert_programs.FUSED,
        "fused-grouped": _NAMES + expert_programs.FUSED_GROUPED,
        "stacked": _NAMES + expert_programs.STACKED,
        "megatron": _NAMES + expert_programs.MEGATRON,
        "megatron-local": _NAMES + expert_programs.MEGATRON_LOCAL,
        "megatron-dist": _NAMES + expert_programs.MEGATRON_DIST,
        "megatron-dist-layers": _NAMES + expert_programs.MEGATRON_DIST_LAYERS,
    },
    blocks=all_moe,
)
