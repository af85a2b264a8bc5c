"""GPT-2 programs: fused q, k and v, and weights stored as [in, out] on Hugging Face but [out, in] elsewhere.

The oldest Hugging Face files also contain causal masks, which are not weights.
"""

from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.layer_kinds import all_dense

_NO_MASKS = """
{layer}.attn.bias -> _, optional
{layer}.attn.masked_bias -> _, optional
"""

_LINEAR = """
{layer}.attn.c_proj.weight^T -> {layer}.attn.c_proj.weight
{layer}.mlp.c_fc.weight^T -> {layer}.mlp.c_fc.weight
{layer}.mlp.c_proj.weight^T -> {layer}.mlp.c_proj.weight
"""

_SEPARATE = """
{layer}.attn.c_attn.weight^T ->
    {layer}.attn.q_proj.weight, {layer}.attn.k_proj.weight, {layer}.attn.v_proj.weight, axis=0
{layer}.attn.c_attn.bias ->
    {layer}.attn.q_proj.bias, {layer}.attn.k_proj.bias, {layer}.attn.v_proj.bias, axis=0
"""

_GROUPED = """
{layer}.attn.q_proj.weight, {layer}.attn.k_proj.weight, {layer}.attn.v_proj.weight ->
    {layer}.attn.qkv_proj.weight, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={heads}
{layer}.attn.q_proj.bias, {layer}.attn.k_proj.bias, {layer}.attn.v_proj.bias ->
    {layer}.attn.qkv_proj.bias, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={heads}
"""

_FUSED = """
{layer}.attn.c_attn.weight^T -> {layer}.attn.qkv_proj.weight
{layer}.attn.c_attn.bias -> {layer}.attn.qkv_proj.bias
"""

_MEGATRON_ENDS = """
{p}wte.weight -> embedding.word_embeddings.weight
{p}wpe.weight -> embedding.position_embeddings.weight
{p}ln_f.weight -> decoder.final_layernorm.weight
{p}ln_f.bias -> decoder.final_layernorm.bias
lm_head.weight -> output_layer.weight, optional
"""

_MEGATRON_BLOCKS = """
{layer}.attn.qkv_proj.weight -> {block}.self_attention.linear_qkv.weight
{layer}.attn.qkv_proj.bias -> {block}.self_attention.linear_qkv.bias
{layer}.attn.c_proj.weight^T -> {block}.self_attention.linear_proj.weight
{layer}.attn.c_proj.bias -> {block}.self_attention.linear_proj.bias
{layer}.mlp.c_fc.weight^T -> {block}.mlp.linear_fc1.weight
{layer}.mlp.c_fc.bias -> {block}.mlp.linear_fc1.bias
{layer}.mlp.c_proj.weight^T -> {block}.mlp.linear_fc2.weight
{layer}.mlp.c_proj.bias -> {block}.mlp.linear_fc2.bias
"""

_MEGATRON_NORMS = """
{layer}.ln_1.weight -> {block}.self_attention.linear_qkv.layer_norm_weight
{layer}.ln_1.bias -> {block}.self_attention.linear_qkv.layer_norm_bias
{layer}.ln_2.weight -> {block}.mlp.linear_fc1.layer_norm_weight
{layer}.ln_2.bias -> {block}.mlp.linear_fc1.layer_norm_bias
"""

_MEGATRON_LOCAL_NORMS = """
{layer}.ln_1.weight -> {block}.input_layernorm.weight
{layer}.ln_1.bias -> {block}.input_layernorm.bias
{layer}.ln_2.weight -> {block}.pre_mlp_layernorm.weight
{layer}.ln_2.bias -> {block}.pre_mlp_layernorm.bias
"""

_MEGATRON_DIST = """
{layers}.*.attn.qkv_proj.weight -> decoder.layers.self_attention.linear_qkv.weight, axis=0, stack
{layers}.*.attn.qkv_proj.bias -> decoder.layers.self_attention.linear_qkv.bias, axis=0, stack
{layers}.*.attn.c_proj.weight^T -> decoder.layers.self_attention.linear_proj.weight, axis=0, stack
{layers}.*.attn.c_proj.bias -> decoder.layers.self_attention.linear_proj.bias, axis=0, stack
{layers}.*.mlp.c_fc.weight^T -> decoder.layers.mlp.linear_fc1.weight, axis=0, stack
{layers}.*.mlp.c_fc.bias -> decoder.layers.mlp.linear_fc1.bias, axis=0, stack
{layers}.*.mlp.c_proj.weight^T -> decoder.layers.mlp.linear_fc2.weight, axis=0, stack
{layers}.*.mlp.c_proj.bias -> decoder.layers.mlp.linear_fc2.bias, axis=0, stack
{layers}.*.ln_1.weight -> decoder.layers.self_attention.linear_qkv.layer_norm_weight, axis=0, stack
{layers}.*.ln_1.bias -> decoder.layers.self_attention.linear_qkv.layer_norm_bias, axis=0, stack
{layers}.*.ln_2.weight -> decoder.layers.mlp.linear_fc1.layer_norm_weight, axis=0, stack
{layers}.*.ln_2.bias -> decoder.layers.mlp.linear_fc1.layer_norm_bias, axis=0, stack
"""

_TO_GROUPED = _NO_MASKS + _SEPARATE + _GROUPED

GPT2 = ModelFamily(
    name="gpt2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    programs={
        "separate": _NO_MASKS + _SEPARATE + _LINEAR,
        "fused": _NO_MASKS + _FUSED + _LINEAR,
        "fused-grouped": _TO_GROUPED + _LINEAR,
        "megatron": _TO_GROUPED + _MEGATRON_ENDS + _MEGATRON_BLOCKS + _MEGATRON_NORMS,
        "megatron-local": _TO_GROUPED + _MEGATRON_ENDS + _MEGATRON_BLOCKS + _MEGATRON_LOCAL_NORMS,
        "megatron-dist": _TO_GROUPED + _MEGATRON_ENDS + _MEGATRON_DIST,
    },
    blocks=all_dense,
    prefix="transformer.",
    layers="h",
)
