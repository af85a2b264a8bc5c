"""What the rules say of operations by the family: which shards send nothing at all, and which composites send often.

It stands beside the table, whose lines say the same of single operations.
"""

from __future__ import annotations

import fnmatch

# letters whose shards send nothing: rows of a batch, and what is summed into a Partial
FREE: dict[str, str] = {
    "conv[123]d* conv_transpose*": "n",
    "conv2d conv2d_plain conv2d_same* conv2d_stride conv2d_dilation conv2d_depthwise conv3d conv_transpose*": "c",
    "mse_loss_* l1_loss_* smooth_l1_loss_* huber_loss_* bce_* soft_margin_* gaussian_nll_* margin_ranking_*": "nm",
    "cross_entropy_*_sum cross_entropy_*_none nll_*_sum nll_*_none kl_div_* triplet_* cosine_embedding_*": "n",
    "sum_* nansum_* any_* all_* vector_norm_1.0 vector_norm_0.0": "nmk",
    "mm addmm outer group_norm rms_norm instance_norm_affine conv1d": "n",
    "embedding_weight_first": "vm",
    "embedding embedding_1d embedding_padding": "nl",
    "F.prelu add_broadcast mul_broadcast masked_fill_plain": "nm",
    "SGD_* Adam_* AdamW_* Adagrad_* Adadelta_* Adamax_* NAdam_* RAdam_* RMSprop_* ASGD_* Rprop_plain": "nm",
}

# how often, each way, a composite brings together what it must
ROUNDS: dict[str, int] = {
    # a view of the sharded dim is gathered when it is taken, and what it was taken of when it is written through
    "row_mul_* slice_zero_* step_add_ narrow_copy_ select_fill_ transpose_slice_ view_mul_": 5,
    # gradients that compare, divide and select
    "scatter_reduce_* renorm corrcoef": 7,
    "atan2 copysign fmax fmin maximum minimum pow_tensor sinc isclose xlogy cumprod_* prod_* logcumsumexp_*": 2,
    "vector_norm_* lp_pool2d pad?d_circular": 2,
    "all_* any_*": 3,
    "cosine_* kl_div_* kron matrix_power bilinear repeat_interleave diagonal take F.normalize cdist cov": 2,
    # a gradient of a gradient
    "*_double_backward": 3,
    # pads, squares and pools
    "local_response_norm": 5,
    # three steps; Muon multiplies matrices, LBFGS looks along a line up to twenty times a step
    "Adafactor Rprop_foreach": 8,
    "Muon": 16,
    "LBFGS": 100,
    "SGD_* Adam* NAdam_* RAdam_* Ada*_* RMSprop_* ASGD_* Rprop_plain": 3,
}


def free_of(name: str) -> str:
    """The letters that the family of an operation lets be sharded for nothing."""
    return "".join(letters for patterns, letters in FREE.items() if _is_named(name, patterns))


def rounds_of(name: str) -> int:
    """How often an operation brings together what is not free."""
    return max((rounds for patterns, rounds in ROUNDS.items() if _is_named(name, patterns)), default=1)


def _is_named(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())
