"""Every operator that was measured to be wrong, to hang, to raise or to gather with torch alone, and where it is tried.

The sections are those of the measurement; the values are names, or patterns of names, of operations of the table.
"""

from __future__ import annotations

WRONG: dict[str, str] = {
    "mse": "mse_loss_* smooth_l1_loss_* huber_loss_* bce_* soft_margin_* bce_logits_*",
    "y[2:6]=v": "set_slice set_slice_scalar set_step_scalar set_row set_row_scalar",
    "y[1].mul_()": "row_mul_ row_mul_grad slice_zero_ slice_zero_grad step_add_ narrow_copy_ select_fill_",
    ".item()": "item float bool int_of item_first",
    "scans": "cumsum_-1 cumsum_-2 cumprod_-1 cumprod_-2 logcumsumexp_-1 logcumsumexp_-2",
    "amin": "amin_full amin_0 amax_full amax_0 vector_norm_inf vector_norm_-inf vector_norm_dim_inf",
    "batch_norm": "batch_norm_train batch_norm_plain batch_norm_running batch_norm_running_grad",
    "cross_entropy": "cross_entropy_mean cross_entropy_ignore_mean cross_entropy_weight_mean",
    "conv": "conv1d conv2d conv2d_plain conv2d_weight conv2d_stride conv2d_dilation conv2d_depthwise conv2d_groups "
    "conv2d_depthwise_weight conv3d conv_transpose1d conv_transpose2d",
    "on all-Partial": "lerp_tensor addcdiv",
    "double backward": "conv2d_double_backward mm_double_backward",
    "random": "rand_like randn_like dropout uniform_ normal_ xavier_ trunc_normal_",
}

HANG: dict[str, str] = {
    "extremes": "amin_* amax_* argmin_* argmax_* min_full max_full aminmax vector_norm_inf",
    "clip_grad_norm_(inf)": "clip_grad_norm_inf_*",
    "empty channels": "batch_norm_train max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "interpolate_nearest interpolate_bilinear interpolate_bicubic interpolate_area interpolate_linear",
    "one_hot": "one_hot one_hot_classes",
}

RAISE: dict[str, str] = {
    "y[i]=scalar": "set_row_scalar set_index_scalar set_element",
    "masks": "mask mask_rows mask_plain mask_of_itself set_mask_scalar set_mask_rows set_mask_plain masked_select "
    "masked_scatter masked_fill masked_fill_plain",
    "plain and list indices": "index_plain index_list set_index_plain",
    "shapes that depend on values": "nonzero nonzero_tuple unique unique_all unique_dim bincount bincount_weights "
    "repeat_interleave_tensor",
    "others": "scatter_reduce_* searchsorted bucketize allclose tolist cdist bilinear unfold F.unfold F.fold renorm t_ "
    "poisson random_",
    "embedding": "embedding_bag_* embedding_max_norm embedding_weight_first",
    "padding": "pad1d_reflect pad1d_replicate pad2d_reflect pad2d_replicate",
    "attention": "sdpa sdpa_causal sdpa_mask",
    "norms, backward": "group_norm group_norm_plain",
    "indexing, backward": "set_index index_put index_put_ index_put_accumulate select_scatter slice_scatter",
    "reductions, backward": "prod_0 prod_-1 cumprod_* cummax_* cummin_* trace avg_pool2d",
    "activations, backward": "F.hardtanh F.relu6 F.hardswish F.hardsigmoid F.hardshrink F.softshrink F.logsigmoid "
    "F.prelu angle polar",
    "uneven": "flatten linear_3d einsum instance_norm instance_norm_affine repeat_interleave rms_norm rms_norm_plain "
    "unbind_0 unbind_1",
    "optimizers": "SGD_fused Adagrad_fused Rprop_foreach Adafactor Muon LBFGS clip_grad_norm_2.0_*",
    "elementwise": "atan2 fmax fmin bitwise_and bitwise_or bitwise_xor bitwise_not reciprocal",
    "indices": "index_zero_dim index_negative index_range select_negative select_range set_range",
}

GATHER: dict[str, str] = {
    "norms": "group_norm instance_norm batch_norm_train batch_norm_eval layer_norm layer_norm_plain",
    "images": "grid_sample pad1d_circular pad2d_circular",
    "stacks of matrices": "tril triu diag_embed linalg.eigh linalg.svdvals linalg.qr linalg.cholesky linalg.inv "
    "linalg.solve",
    "along a dim": "softmax_0 softmax_wide log_softmax_wide logsumexp_0 var_0 min_0 max_0 gather_0 index_select_0 "
    "index_add scatter_0 cumsum_0 topk_0 sort_0 roll flip slice_0 slice_step repeat cat_0",
    "classes": "cross_entropy_wide_mean cross_entropy_wide_sum cross_entropy_wide_none",
}

NAMED = {"wrong": WRONG, "hang": HANG, "raise": RAISE, "gather": GATHER}
