"""Mixtral: experts in all layers, with their own Hugging Face names (w1 is gate, w3 is up, w2 is down)."""

from holdfast.mapping.families import moe
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layers import all_moe

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
        "fused": _NAMES + moe.FUSED,
        "fused-grouped": _NAMES + moe.FUSED_GROUPED,
        "stacked": _NAMES + moe.STACKED,
        "megatron": _NAMES + moe.MEGATRON,
        "megatron-local": _NAMES + moe.MEGATRON_LOCAL,
        "megatron-dist": _NAMES + moe.MEGATRON_DIST,
        "megatron-dist-layers": _NAMES + moe.MEGATRON_DIST_LAYERS,
    },
    blocks=all_moe,
)
