"""DeepSeek-V3 programs: latent attention, dense first layers, then routed and shared experts, fp8 scales.

Multi-token prediction layers follow the last layer. The Hugging Face weights are fp8 with one scale per
128 x 128 block. The stacked programs stack scales with their experts; the others need unquantized weights.
"""

from holdfast.mapping.families import statements as text
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import deepseek_v3

_FUSED_SHARED = """
{layer}.mlp.shared_experts.gate_proj.weight, {layer}.mlp.shared_experts.up_proj.weight ->
    {layer}.mlp.shared_experts.gate_up_proj.weight, axis=0, sizes=equal, optional
"""

_STACKED_SCALES = """
{layer}.mlp.experts.$EXPERT_ID.gate_proj.weight_scale_inv, {layer}.mlp.experts.$EXPERT_ID.up_proj.weight_scale_inv ->
    gate_up_scale.$LAYER_ID.$EXPERT_ID, axis=0, sizes=equal, optional
gate_up_scale.$LAYER_ID.* -> {layer}.mlp.experts.gate_up_proj_scale_inv, axis=0, stack, optional
{layer}.mlp.experts.*.down_proj.weight_scale_inv ->
    {layer}.mlp.experts.down_proj_scale_inv, axis=0, stack, optional
"""

_MEGATRON_LATENT_ATTENTION = """
{layer}.input_layernorm.weight -> {block}.input_layernorm.weight
{layer}.self_attn.q_proj.weight -> {block}.self_attention.linear_q_proj.weight, optional
{layer}.self_attn.q_a_proj.weight -> {block}.self_attention.linear_q_down_proj.weight, optional
{layer}.self_attn.q_b_proj.weight -> {block}.self_attention.linear_q_up_proj.weight, optional
{layer}.self_attn.kv_a_proj_with_mqa.weight -> {block}.self_attention.linear_kv_down_proj.weight
{layer}.self_attn.kv_b_proj.weight -> {block}.self_attention.linear_kv_up_proj.weight
{layer}.self_attn.o_proj.weight -> {block}.self_attention.linear_proj.weight
{layer}.self_attn.q_a_proj.bias -> {block}.self_attention.linear_q_down_proj.bias, optional
{layer}.self_attn.kv_a_proj_with_mqa.bias -> {block}.self_attention.linear_kv_down_proj.bias, optional
{layer}.self_attn.o_proj.bias -> {block}.self_attention.linear_proj.bias, optional
"""

_MEGATRON_LATENT_NORMS = """
{layer}.self_attn.q_a_layernorm.weight -> {block}.self_attention.linear_q_up_proj.layer_norm_weight, optional
{layer}.self_attn.kv_a_layernorm.weight -> {block}.self_attention.linear_kv_up_proj.layer_norm_weight
"""

_MEGATRON_LOCAL_LATENT_NORMS = """
{layer}.self_attn.q_a_layernorm.weight -> {block}.self_attention.q_layernorm.weight, optional
{layer}.self_attn.kv_a_layernorm.weight -> {block}.self_attention.kv_layernorm.weight
{layer}.post_attention_layernorm.weight -> {block}.pre_mlp_layernorm.weight
"""

_MEGATRON_SHARED = """
{moe_layer}.mlp.gate.e_score_correction_bias -> {block}.mlp.router.expert_bias
{moe_layer}.mlp.shared_experts.gate_proj.weight, {moe_layer}.mlp.shared_experts.up_proj.weight ->
    {block}.mlp.shared_experts.linear_fc1.weight, axis=0, sizes=equal
{moe_layer}.mlp.shared_experts.down_proj.weight -> {block}.mlp.shared_experts.linear_fc2.weight
"""

_MEGATRON_PREDICTORS = """
{predictor}.enorm.weight -> {block}.enorm.weight
{predictor}.hnorm.weight -> {block}.hnorm.weight
{predictor}.eh_proj.weight -> {block}.eh_proj.weight
{predictor}.shared_head.norm.weight -> {block}.final_layernorm.weight
# copies of the embedding and the head, which Megatron shares
{predictor}.embed_tokens.weight -> _
{predictor}.shared_head.head.weight -> _
"""

_MEGATRON = (
    text.MEGATRON_ENDS
    + _MEGATRON_LATENT_ATTENTION
    + text.MEGATRON_MLP
    + text.MEGATRON_ROUTER
    + _MEGATRON_SHARED
    + _MEGATRON_PREDICTORS
)
_MEGATRON_NORMS = _MEGATRON_LATENT_NORMS + text.MEGATRON_DENSE_NORM + text.MEGATRON_MOE_NORM

_PADDLE = """
{layer}.self_attn.q_proj.weight^T -> {layer}.self_attn.q_proj.weight, optional
{layer}.self_attn.q_a_proj.weight^T -> {layer}.self_attn.q_a_proj.weight, optional
{layer}.self_attn.q_b_proj.weight^T -> {layer}.self_attn.q_b_proj.weight, optional
{layer}.self_attn.kv_a_proj_with_mqa.weight^T -> {layer}.self_attn.kv_a_proj_with_mqa.weight
{layer}.self_attn.kv_b_proj.weight^T -> {layer}.self_attn.kv_b_proj.weight
{layer}.self_attn.o_proj.weight^T -> {layer}.self_attn.o_proj.weight
{layer}.mlp.shared_experts.gate_proj.weight^T -> {layer}.mlp.shared_experts.gate_proj.weight, optional
{layer}.mlp.shared_experts.up_proj.weight^T -> {layer}.mlp.shared_experts.up_proj.weight, optional
{layer}.mlp.shared_experts.down_proj.weight^T -> {layer}.mlp.shared_experts.down_proj.weight, optional
"""

DEEPSEEK_V3 = ModelFamily(
    name="deepseek-v3",
    model_types=("deepseek_v3",),
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    programs={
        "fused": text.FUSED_MLP + _FUSED_SHARED + text.FUSED_EXPERTS,
        "stacked": text.STACKED_EXPERTS + _STACKED_SCALES,
        "megatron": _MEGATRON + _MEGATRON_NORMS + text.MEGATRON_GROUPED_EXPERTS,
        "megatron-local": _MEGATRON + _MEGATRON_LOCAL_LATENT_NORMS + text.MEGATRON_LOCAL_EXPERTS,
        "megatron-dist-layers": _MEGATRON + _MEGATRON_NORMS + text.MEGATRON_STORED_EXPERTS,
        "paddle": _PADDLE + text.PADDLE_MLP + text.PADDLE_EXPERTS,
    },
    blocks=deepseek_v3,
    # Megatron-Core renamed the inner layer of a predictor; older versions and stored checkpoints use this name.
    renames={".transformer_layer.": ".mtp_model_layer."},
)
