"""Norms, convolutions, pooling, embeddings, attention, matrix products and linear algebra."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.spmd.table import Table

TABLE = Table("network")


def _batch_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _batch_norm_running(x: Any, mean: Any, var: Any) -> Any:
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, training=True), mean, var


def _batch_norm_eval(x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
    return F.batch_norm(x, mean, var, weight, bias, training=False)


STATISTICS = dict.fromkeys("nhwl", "4c")  # two sums per channel each way
AND_RUNNING = {**STATISTICS, "c": "2c"}  # running statistics that are not sharded as the channels are
TABLE.add("batch_norm_train", _batch_norm, "nchw", "c", "c", free="c", reduced=STATISTICS)
TABLE.add("batch_norm_plain", lambda x: F.batch_norm(x, None, None, training=True), "nc", free="c", reduced=STATISTICS)
TABLE.add(
    "batch_norm_running",
    _batch_norm_running,
    "nchw",
    "constant:c",
    "variance:c",
    free="c",
    grad=False,
    reduced=AND_RUNNING,
)
TABLE.add(
    "batch_norm_running_grad",
    lambda x, m, v: _batch_norm_running(x, m, v)[0],
    "ncl",
    "constant:c",
    "variance:c",
    free="c",
    reduced=AND_RUNNING,
)
TABLE.add(
    "batch_norm_eval",
    _batch_norm_eval,
    "nchw",
    "constant:c",
    "variance:c",
    "c",
    "c",
    free="c",
    reduced=STATISTICS,
)
TABLE.add("instance_norm", F.instance_norm, "nchw", free="nc")
TABLE.add("instance_norm_affine", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), "nchw", "c", "c", free="c")
TABLE.add("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "nchw", "c", "c")
TABLE.add("group_norm_plain", lambda x: F.group_norm(x, 2), "nchw", free="n")
TABLE.add("layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "nlm", "m", "m")
TABLE.add("layer_norm_plain", lambda x: F.layer_norm(x, x.shape[-1:]), "nlm", free="nl")
TABLE.add("layer_norm_two", lambda x: F.layer_norm(x, x.shape[-2:]), "nlm", free="n")
TABLE.add("rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w), "nlm", "m")
TABLE.add("rms_norm_plain", lambda x: F.rms_norm(x, x.shape[-1:]), "nlm", free="nl")
TABLE.add("local_response_norm", lambda x: F.local_response_norm(x, 2), "nchw", free="n")

TABLE.add("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), "nchw", "oc33".replace("3", "2"), "o")
TABLE.add("conv2d_plain", F.conv2d, "nchw", "oc22")
TABLE.add("conv2d_weight", lambda w, x: F.conv2d(x, w, padding=1), "oc22", "nchw", free="o")
TABLE.add(
    "conv2d_depthwise_weight", lambda w, x: F.conv2d(x, w, padding=1, groups=x.shape[1]), "c122", "nchw", free="c"
)
TABLE.add("conv2d_same", lambda x, w, b: F.conv2d(x, w, b, dilation=2, padding=1), "nchw", "oc22", "o")
TABLE.add("conv2d_same_wide", lambda x, w: F.conv2d(x, w.repeat(1, 1, 2, 2)[..., :3, :3], padding=1), "nchw", "oc22")
TABLE.add(
    "conv2d_same_depthwise", lambda x, w: F.conv2d(x, w, dilation=2, padding=1, groups=x.shape[1]), "nchw", "c122"
)
TABLE.add("conv2d_stride", lambda x, w: F.conv2d(x, w, stride=2, padding=1), "nchw", "oc22")
TABLE.add("conv2d_dilation", lambda x, w: F.conv2d(x, w, dilation=2, padding=2), "nchw", "oc22")
TABLE.add("conv2d_depthwise", lambda x, w: F.conv2d(x, w, padding=1, groups=x.shape[1]), "nchw", "c122")
TABLE.add("conv2d_groups", lambda x, w: F.conv2d(x, w[:, : x.shape[1] // 2], groups=2), "nchw", "oc22")
TABLE.add("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), "ncl", "oc2", "o")
TABLE.add("conv3d", lambda x, w: F.conv3d(x, w, padding=1), "nc6hw", "oc222")
TABLE.add("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), "nchw", "co22", "o")
TABLE.add("conv_transpose1d", F.conv_transpose1d, "ncl", "co2")

for _n, _dims in (("1d", "ncl"), ("2d", "nchw")):
    TABLE.add(f"max_pool{_n}", lambda x, _n=_n: getattr(F, f"max_pool{_n}")(x, 2), _dims, free="nc")
    TABLE.add(f"avg_pool{_n}", lambda x, _n=_n: getattr(F, f"avg_pool{_n}")(x, 2), _dims, free="nc")
    TABLE.add(f"adaptive_avg_pool{_n}", lambda x, _n=_n: getattr(F, f"adaptive_avg_pool{_n}")(x, 2), _dims, free="nc")
    TABLE.add(f"adaptive_max_pool{_n}", lambda x, _n=_n: getattr(F, f"adaptive_max_pool{_n}")(x, 2), _dims, free="nc")
TABLE.add("adaptive_avg_pool2d_1", lambda x: F.adaptive_avg_pool2d(x, 1), "nchw", free="nc")
TABLE.add("max_pool2d_padded", lambda x: F.max_pool2d(x, 3, 2, 1), "nchw", free="nc")
TABLE.add("max_pool2d_indices", lambda x: F.max_pool2d(x, 2, return_indices=True), "nchw", free="nc")
TABLE.add("avg_pool2d_padded", lambda x: F.avg_pool2d(x, 3, 2, 1), "nchw", free="nc")
TABLE.add("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), "positive:nchw", free="nc")
for _mode in "nearest bilinear bicubic area".split():
    TABLE.add(f"interpolate_{_mode}", lambda x, _m=_mode: F.interpolate(x, scale_factor=2, mode=_m), "nchw", free="nc")
TABLE.add("interpolate_linear", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), "ncl", free="nc")
TABLE.add("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), "nchw", "small:nhw2", free="n")
TABLE.add("pixel_shuffle", lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2), "nchw", free="n")
TABLE.add("F.unfold", lambda x: F.unfold(x, 2), "nchw", free="n")
TABLE.add("F.fold", lambda x: F.fold(F.unfold(x, 2), x.shape[2:], 2), "nchw", free="n")
TABLE.add("channel_shuffle", lambda x: F.channel_shuffle(x, 2), "nchw", free="nhw")

TABLE.add("embedding", F.embedding, "int:nl<v", "vm")
TABLE.add("embedding_1d", F.embedding, "int:n<v", "vm")
TABLE.add("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=1), "int:nl<v", "vm")
TABLE.add("embedding_max_norm", lambda i, w: F.embedding(i, w.clone(), max_norm=1.0), "int:nl<v", "vm", grad=False)
TABLE.add("embedding_scale", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), "int:nl<v", "vm")
TABLE.add("embedding_weight_first", lambda w, i: F.embedding(i, w), "vm", "int:nl<v")
TABLE.add("embedding_plain", lambda w, i: F.embedding(i, w), "vm", "plainint:nl<v")
for _mode in ("sum", "mean", "max"):
    TABLE.add(f"embedding_bag_{_mode}", lambda w, i, _m=_mode: F.embedding_bag(i, w, mode=_m), "vm", "int:nl<v")

TABLE.add("sdpa", F.scaled_dot_product_attention, "ntlm", "ntlm", "ntlm", free="nt")
TABLE.add(
    "sdpa_causal",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "ntlm",
    "ntlm",
    "ntlm",
    free="nt",
)
TABLE.add(
    "sdpa_mask",
    lambda q, k, v, a: F.scaled_dot_product_attention(q, k, v, attn_mask=a),
    "ntlm",
    "ntlm",
    "ntlm",
    "constant:ll",
    free="nt",
)

TABLE.add("mm", torch.mm, "nm", "mk", free="")
TABLE.add("bmm", torch.bmm, "tnm", "tmk", free="t")
TABLE.add("matmul_3d", torch.matmul, "tnm", "mk")
TABLE.add("mv", torch.mv, "nm", "m")
TABLE.add("dot", torch.dot, "n", "n")
TABLE.add("outer", torch.outer, "n", "m")
TABLE.add("addmm", torch.addmm, "nk", "nm", "mk")
TABLE.add("addmv", torch.addmv, "n", "nm", "m")
TABLE.add("baddbmm", torch.baddbmm, "tnk", "tnm", "tmk", free="t")
TABLE.add("linear", F.linear, "nm", "om", "o")
TABLE.add("linear_weight", lambda w, x: F.linear(x, w), "om", "nm")
TABLE.add("linear_3d", F.linear, "nlm", "om", "o")
TABLE.add("bilinear", F.bilinear, "nm", "nk", "omk", "o")
TABLE.add("einsum", lambda x, y: torch.einsum("nlm,om->nlo", x, y), "nlm", "om")
TABLE.add("einsum_batch", lambda x, y: torch.einsum("tnm,tmk->tnk", x, y), "tnm", "tmk", free="t")
TABLE.add("tensordot", lambda x, y: torch.tensordot(x, y, 1), "nlm", "mk")
TABLE.add("kron", torch.kron, "nm", "22")
TABLE.add("cross", lambda x, y: torch.linalg.cross(x[..., :3], y[..., :3]), "n6", "n6", free="n")
TABLE.add("matrix_power", lambda x: torch.matrix_power(x, 2), "small:tnn", free="t")


def _double_backward(x: Any, y: Any) -> Any:
    (first,) = torch.autograd.grad((torch.mm(x, y) ** 2).sum(), x, create_graph=True)
    return first


def _gradient_penalty(x: Any, w: Any) -> Any:
    (first,) = torch.autograd.grad((F.conv2d(x, w) ** 2).sum(), x, create_graph=True)
    return first


TABLE.add("mm_double_backward", _double_backward, "nm", "mk")
TABLE.add("conv2d_double_backward", _gradient_penalty, "nchw", "oc22")
TABLE.add("linalg.eigh", lambda x: torch.linalg.eigh(x)[0], "spd:tmm", free="t")
TABLE.add("linalg.svdvals", torch.linalg.svdvals, "tnm", free="t")
TABLE.add("linalg.qr", lambda x: torch.linalg.qr(x)[1].abs(), "tnm", free="t", grad=False)
FAILURES = {"t": "2t"}  # every rank must know whether some matrix has no solution
TABLE.add("linalg.cholesky", torch.linalg.cholesky, "spd:tmm", free="t", reduced=FAILURES)
TABLE.add("linalg.inv", torch.linalg.inv, "spd:tmm", free="t", reduced=FAILURES)
TABLE.add("linalg.solve", torch.linalg.solve, "spd:tmm", "tmk", free="t", reduced=FAILURES)
TABLE.add("linalg.det", torch.linalg.det, "spd:tmm", free="t")
TABLE.add("linalg.matrix_norm", torch.linalg.matrix_norm, "tnm", free="t")
