"""Statement templates that several families share: fused, stacked, Megatron, Paddle; see `fill` for the fields.

Gate and up have equal sizes; `sizes=equal` records this so that joined weights can be split again. With
`axis=0`, weights are [out, in] as in torch.
"""

FUSED_QKV = """
{layer}.self_attn.q_proj.weight, {layer}.self_attn.k_proj.weight, {layer}.self_attn.v_proj.weight ->
    {layer}.self_attn.qkv_proj.weight, axis=0{qkv_sizes}
{layer}.self_attn.q_proj.bias, {layer}.self_attn.k_proj.bias, {layer}.self_attn.v_proj.bias ->
    {layer}.self_attn.qkv_proj.bias, axis=0{qkv_sizes}, optional
"""

GROUPED_QKV = """
{layer}.self_attn.q_proj.weight, {layer}.self_attn.k_proj.weight, {layer}.self_attn.v_proj.weight ->
    {layer}.self_attn.qkv_proj.weight, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={kv_heads}
{layer}.self_attn.q_proj.bias, {layer}.self_attn.k_proj.bias, {layer}.self_attn.v_proj.bias ->
    {layer}.self_attn.qkv_proj.bias, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={kv_heads}, optional
"""

FUSED_MLP = """
{layer}.mlp.gate_proj.weight, {layer}.mlp.up_proj.weight ->
    {layer}.mlp.gate_up_proj.weight, axis=0, sizes=equal, optional
{layer}.mlp.gate_proj.bias, {layer}.mlp.up_proj.bias ->
    {layer}.mlp.gate_up_proj.bias, axis=0, sizes=equal, optional
"""

FUSED_EXPERTS = """
{layer}.mlp.experts.$EXPERT_ID.gate_proj.weight, {layer}.mlp.experts.$EXPERT_ID.up_proj.weight ->
    {layer}.mlp.experts.$EXPERT_ID.gate_up_proj.weight, axis=0, sizes=equal
"""

STACKED_EXPERTS = """
{layer}.mlp.experts.$EXPERT_ID.gate_proj.weight, {layer}.mlp.experts.$EXPERT_ID.up_proj.weight ->
    gate_up.$LAYER_ID.$EXPERT_ID, axis=0, sizes=equal
gate_up.$LAYER_ID.* -> {layer}.mlp.experts.gate_up_proj, axis=0, stack
{layer}.mlp.experts.*.down_proj.weight -> {layer}.mlp.experts.down_proj, axis=0, stack
"""

MEGATRON_ENDS = """
{p}embed_tokens.weight -> embedding.word_embeddings.weight
{p}norm.weight -> decoder.final_layernorm.weight
# there is no head where the embedding is shared
lm_head.weight -> output_layer.weight, optional
"""

MEGATRON_ATTENTION = """
{layer}.self_attn.q_proj.weight, {layer}.self_attn.k_proj.weight, {layer}.self_attn.v_proj.weight ->
    {block}.self_attention.linear_qkv.weight, axis=0, fused_qkv,
    num_heads={heads}, num_key_value_groups={kv_heads}
{layer}.self_attn.q_proj.bias, {layer}.self_attn.k_proj.bias, {layer}.self_attn.v_proj.bias ->
    {block}.self_attention.linear_qkv.bias, axis=0, fused_qkv,
    num_heads={heads}, num_key_value_groups={kv_heads}, optional
{layer}.self_attn.o_proj.weight -> {block}.self_attention.linear_proj.weight
{layer}.self_attn.o_proj.bias -> {block}.self_attention.linear_proj.bias, optional
"""

MEGATRON_QK_NORMS = """
{layer}.self_attn.q_norm.weight -> {block}.self_attention.q_layernorm.weight
{layer}.self_attn.k_norm.weight -> {block}.self_attention.k_layernorm.weight
"""

# Transformer Engine stores a norm inside the linear layer that follows it.
MEGATRON_INPUT_NORM = """
{layer}.input_layernorm.weight -> {block}.self_attention.linear_qkv.layer_norm_weight
"""
MEGATRON_DENSE_NORM = """
{dense_layer}.post_attention_layernorm.weight -> {block}.mlp.linear_fc1.layer_norm_weight
"""
MEGATRON_MOE_NORM = """
{moe_layer}.post_attention_layernorm.weight -> {block}.pre_mlp_layernorm.weight
"""
MEGATRON_LOCAL_NORMS = """
{layer}.input_layernorm.weight -> {block}.input_layernorm.weight
{layer}.post_attention_layernorm.weight -> {block}.pre_mlp_layernorm.weight
"""

MEGATRON_MLP = """
{dense_layer}.mlp.gate_proj.weight, {dense_layer}.mlp.up_proj.weight ->
    {block}.mlp.linear_fc1.weight, axis=0, sizes=equal
{dense_layer}.mlp.down_proj.weight -> {block}.mlp.linear_fc2.weight
{dense_layer}.mlp.gate_proj.bias, {dense_layer}.mlp.up_proj.bias ->
    {block}.mlp.linear_fc1.bias, axis=0, sizes=equal, optional
{dense_layer}.mlp.down_proj.bias -> {block}.mlp.linear_fc2.bias, optional
"""

MEGATRON_ROUTER = """
{moe_layer}.mlp.gate.weight -> {block}.mlp.router.weight
"""

# One weight per expert of a grouped GEMM.
MEGATRON_GROUPED_EXPERTS = """
{moe_layer}.mlp.experts.$EXPERT_ID.gate_proj.weight, {moe_layer}.mlp.experts.$EXPERT_ID.up_proj.weight ->
    {block}.mlp.experts.linear_fc1.weight$EXPERT_ID, axis=0, sizes=equal
{moe_layer}.mlp.experts.$EXPERT_ID.down_proj.weight -> {block}.mlp.experts.linear_fc2.weight$EXPERT_ID
"""

MEGATRON_LOCAL_EXPERTS = """
{moe_layer}.mlp.experts.$EXPERT_ID.gate_proj.weight, {moe_layer}.mlp.experts.$EXPERT_ID.up_proj.weight ->
    {block}.mlp.experts.local_experts.$EXPERT_ID.linear_fc1.weight, axis=0, sizes=equal
{moe_layer}.mlp.experts.$EXPERT_ID.down_proj.weight ->
    {block}.mlp.experts.local_experts.$EXPERT_ID.linear_fc2.weight
"""

# Megatron's distributed checkpoints store the experts of a layer as one tensor ...
MEGATRON_STORED_EXPERTS = """
{moe_layer}.mlp.experts.$EXPERT_ID.gate_proj.weight, {moe_layer}.mlp.experts.$EXPERT_ID.up_proj.weight ->
    {moe_layer}.fc1.$EXPERT_ID, axis=0, sizes=equal
{moe_layer}.fc1.* -> {block}.mlp.experts.experts.linear_fc1.weight, axis=0, stack
{moe_layer}.mlp.experts.*.down_proj.weight -> {block}.mlp.experts.experts.linear_fc2.weight, axis=0, stack
"""

# ... and, if all layers are alike, every weight of all layers as one tensor.
MEGATRON_DIST_ATTENTION = """
{layers}.*.input_layernorm.weight -> decoder.layers.self_attention.linear_qkv.layer_norm_weight, axis=0, stack
{layer}.self_attn.q_proj.weight, {layer}.self_attn.k_proj.weight, {layer}.self_attn.v_proj.weight ->
    qkv.$LAYER_ID.weight, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={kv_heads}
qkv.*.weight -> decoder.layers.self_attention.linear_qkv.weight, axis=0, stack
{layer}.self_attn.q_proj.bias, {layer}.self_attn.k_proj.bias, {layer}.self_attn.v_proj.bias ->
    qkv.$LAYER_ID.bias, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={kv_heads}, optional
qkv.*.bias -> decoder.layers.self_attention.linear_qkv.bias, axis=0, stack, optional
{layers}.*.self_attn.o_proj.weight -> decoder.layers.self_attention.linear_proj.weight, axis=0, stack
{layers}.*.self_attn.o_proj.bias -> decoder.layers.self_attention.linear_proj.bias, axis=0, stack, optional
"""

MEGATRON_DIST_QK_NORMS = """
{layers}.*.self_attn.q_norm.weight -> decoder.layers.self_attention.q_layernorm.weight, axis=0, stack
{layers}.*.self_attn.k_norm.weight -> decoder.layers.self_attention.k_layernorm.weight, axis=0, stack
"""

MEGATRON_DIST_MLP = """
{layers}.*.post_attention_layernorm.weight -> decoder.layers.mlp.linear_fc1.layer_norm_weight, axis=0, stack
{layer}.mlp.gate_proj.weight, {layer}.mlp.up_proj.weight -> fc1.$LAYER_ID.weight, axis=0, sizes=equal
fc1.*.weight -> decoder.layers.mlp.linear_fc1.weight, axis=0, stack
{layers}.*.mlp.down_proj.weight -> decoder.layers.mlp.linear_fc2.weight, axis=0, stack
{layer}.mlp.gate_proj.bias, {layer}.mlp.up_proj.bias ->
    fc1.$LAYER_ID.bias, axis=0, sizes=equal, optional
fc1.*.bias -> decoder.layers.mlp.linear_fc1.bias, axis=0, stack, optional
{layers}.*.mlp.down_proj.bias -> decoder.layers.mlp.linear_fc2.bias, axis=0, stack, optional
"""

MEGATRON_DIST_MOE = """
{layers}.*.post_attention_layernorm.weight -> decoder.layers.pre_mlp_layernorm.weight, axis=0, stack
{layers}.*.mlp.gate.weight -> decoder.layers.mlp.router.weight, axis=0, stack
{layer}.mlp.experts.$EXPERT_ID.gate_proj.weight, {layer}.mlp.experts.$EXPERT_ID.up_proj.weight ->
    fc1.$LAYER_ID.$EXPERT_ID, axis=0, sizes=equal
fc1.$LAYER_ID.* -> fc1s.$LAYER_ID, axis=0, stack
fc1s.* -> decoder.layers.mlp.experts.experts.linear_fc1.weight, axis=0, stack
{layer}.mlp.experts.*.down_proj.weight -> fc2s.$LAYER_ID, axis=0, stack
fc2s.* -> decoder.layers.mlp.experts.experts.linear_fc2.weight, axis=0, stack
"""

# Paddle's linear layers are [in, out].
PADDLE_ATTENTION = """
{layer}.self_attn.q_proj.weight^T -> {layer}.self_attn.q_proj.weight
{layer}.self_attn.k_proj.weight^T -> {layer}.self_attn.k_proj.weight
{layer}.self_attn.v_proj.weight^T -> {layer}.self_attn.v_proj.weight
{layer}.self_attn.o_proj.weight^T -> {layer}.self_attn.o_proj.weight
"""

PADDLE_MLP = """
{layer}.mlp.gate_proj.weight^T -> {layer}.mlp.gate_proj.weight, optional
{layer}.mlp.up_proj.weight^T -> {layer}.mlp.up_proj.weight, optional
{layer}.mlp.down_proj.weight^T -> {layer}.mlp.down_proj.weight, optional
"""

PADDLE_EXPERTS = """
{layer}.mlp.gate.weight^T -> {layer}.mlp.gate.weight
{layer}.mlp.experts.$EXPERT_ID.gate_proj.weight^T -> {layer}.mlp.experts.$EXPERT_ID.gate_proj.weight
{layer}.mlp.experts.$EXPERT_ID.up_proj.weight^T -> {layer}.mlp.experts.$EXPERT_ID.up_proj.weight
{layer}.mlp.experts.$EXPERT_ID.down_proj.weight^T -> {layer}.mlp.experts.$EXPERT_ID.down_proj.weight
"""

PADDLE_FUSED_ATTENTION = """
{layer}.self_attn.q_proj.weight^T, {layer}.self_attn.k_proj.weight^T, {layer}.self_attn.v_proj.weight^T ->
    {layer}.self_attn.qkv_proj.weight, fused_qkv, num_heads={heads}, num_key_value_groups={kv_heads}
{layer}.self_attn.q_proj.bias, {layer}.self_attn.k_proj.bias, {layer}.self_attn.v_proj.bias ->
    {layer}.self_attn.qkv_proj.bias, axis=0, fused_qkv, num_heads={heads}, num_key_value_groups={kv_heads}, optional
{layer}.self_attn.o_proj.weight^T -> {layer}.self_attn.o_proj.weight
"""

# Gate and up are interleaved by tensor-parallel shard; the degree comes from the run.
PADDLE_FUSED_MLP = """
{layer}.mlp.gate_proj.weight^T, {layer}.mlp.up_proj.weight^T -> {layer}.mlp.up_gate_proj.weight, fused_ffn, optional
{layer}.mlp.down_proj.weight^T -> {layer}.mlp.down_proj.weight, optional
"""

PADDLE_FUSED_EXPERTS = """
{layer}.mlp.gate.weight^T -> {layer}.mlp.gate.weight
{layer}.mlp.experts.$EXPERT_ID.gate_proj.weight^T, {layer}.mlp.experts.$EXPERT_ID.up_proj.weight^T ->
    {layer}.mlp.experts.$EXPERT_ID.up_gate_proj.weight, fused_ffn
{layer}.mlp.experts.$EXPERT_ID.down_proj.weight^T -> {layer}.mlp.experts.$EXPERT_ID.down_proj.weight
"""
