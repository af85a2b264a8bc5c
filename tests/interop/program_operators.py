"""Single operators and layers that are exported with the real Paddle, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from tests.interop.program_models import INF, NAN, Case, Shapes


class Written(nn.Layer):
    """Writes into ranges of a tensor that is used before and after."""

    def forward(self, x: Any) -> Any:
        y = x * 2
        y[:, 1:3] = x[:, 3:5]
        z = y + 1
        y[:, 0] = 5.0
        y[2:4] = x[0]
        y[:, 5] = x[:, 0]
        y[4] = x[1]
        return y, z


class Function(nn.Layer):
    """A function of tensors as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class FunctionOfTwo(nn.Layer):
    """A function of two tensors as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, y: Any) -> Any:
        return self.function(x, y)


class Layers(nn.Layer):
    """Layers one after the other."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


X: Shapes = (([None, 6], "float32"),)
XY: Shapes = (([None, 6], "float32"), ([None, 6], "float32"))
IMAGE: Shapes = (([None, 4, 8, 10], "float32"),)
SIGNAL: Shapes = (([None, 4, 12], "float32"),)
VOLUME: Shapes = (([None, 2, 6, 6, 8], "float32"),)
WHOLE: Shapes = (([None, 6], "int64"),)
WHOLE2: Shapes = (([None, 6], "int64"), ([None, 6], "int64"))
CUBE: Shapes = (([None, 4, 6], "float32"),)


_UNARY = (
    "abs exp expm1 sqrt rsqrt square reciprocal sin cos tan atan sinh cosh asinh tanh floor ceil trunc sign erf log "
    "log2 log10 log1p isnan isinf isfinite neg"
).split()
_ACTIVATIONS = (
    "sigmoid log_sigmoid relu relu6 silu swish hardswish hardsigmoid hardtanh leaky_relu elu celu selu gelu softplus "
    "softsign tanhshrink mish hardshrink softshrink thresholded_relu"
).split()


def _functions() -> dict[str, tuple[Callable[..., Any], Shapes]]:
    cases: dict[str, tuple[Callable[..., Any], Shapes]] = {}
    for name in _UNARY:
        cases[name] = (getattr(paddle, name), X)
    for name in _ACTIVATIONS:
        cases[name] = (getattr(F, name), X)
    half = {name: (lambda x, f=getattr(paddle, name): f(x - 0.5), X) for name in ("asin", "acos", "atanh", "erfinv")}
    binary = {
        name: (getattr(paddle, name), XY)
        for name in "add subtract multiply divide maximum minimum fmax fmin atan2 remainder floor_divide".split()
    }
    compare = {
        name: (getattr(paddle, name), XY)
        for name in "equal not_equal less_than less_equal greater_than greater_equal".split()
    }
    whole = {
        f"whole_{name}": (getattr(paddle, name), WHOLE2)
        for name in "add subtract multiply maximum minimum bitwise_and bitwise_or bitwise_xor equal less_than".split()
    }
    return {**cases, **half, **binary, **compare, **whole}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    **_functions(),
    "acosh": (lambda x: paddle.acosh(x + 1), X),
    "lgamma": (paddle.lgamma, X),
    "digamma": (lambda x: paddle.digamma(x + 1), X),
    "power": (lambda x, y: paddle.pow(x + 0.1, y), XY),
    "power_3": (lambda x: paddle.pow(x, 3.0), X),
    "whole_floor_divide": (lambda x, y: paddle.floor_divide(x - 3, y + 1), WHOLE2),
    "whole_remainder": (lambda x, y: paddle.remainder(x - 3, y + 1), WHOLE2),
    "logical": (lambda x, y: paddle.logical_and(x > 0.5, paddle.logical_not(y > 0.2)), XY),
    "logical_or": (lambda x, y: paddle.logical_or(paddle.logical_xor(x > 0.5, y > 0.2), x > 0.9), XY),
    "bitwise_not": (paddle.bitwise_not, WHOLE),
    "scale": (lambda x: (x * 2 + 1, 1 - x, (x + 3) / 4, paddle.scale(x, 2.0, 1.0, bias_after_scale=False)), X),
    "whole_scale": (lambda x: (x * 2 + 1, 1 - x), WHOLE),
    "cast": (lambda x: (x.astype("float64"), (x * 9).astype("int32"), (x > 0.5).astype("float32")), X),
    "clip": (lambda x: (paddle.clip(x, 0.2, 0.6), paddle.clip(x, min=0.5)), X),
    "whole_clip": (lambda x: paddle.clip(x, 2, 4), WHOLE),
    "where": (lambda x, y: paddle.where(x > y, x, y), XY),
    "where_scalar": (lambda x: paddle.where(x > 0.5, x, paddle.zeros_like(x)), X),
    "broadcast": (lambda x, y: x.unsqueeze(1) + y.unsqueeze(0), XY),
    "gelu_tanh": (lambda x: F.gelu(x, approximate=True), X),
    "softplus_beta": (lambda x: F.softplus(x, 2.0, 1.0), X),
    "swiglu": (paddle.incubate.nn.functional.swiglu, X),
    "swiglu_two": (paddle.incubate.nn.functional.swiglu, XY),
    "glu": (lambda x: F.glu(x, -1), X),
    "prelu": (lambda x: F.prelu(x - 0.5, paddle.full([1], 0.25)), X),
    "sum": (lambda x: (x.sum(), x.sum(-1), x.sum([0, 1], keepdim=True), x.sum(1, dtype="float64")), CUBE),
    "whole_sum": (lambda x: (x.sum(), x.astype("int32").sum(-1)), WHOLE),
    "mean": (lambda x: (x.mean(), x.mean(-1), x.mean([1, 2], keepdim=True)), CUBE),
    "extremes": (lambda x: (x.max(), x.min(-1), x.amax([0, 2]), x.amin(1, keepdim=True)), CUBE),
    "whole_extremes": (lambda x: (x.max(-1), x.min()), WHOLE),
    "prod": (lambda x: (x.prod(), x.prod(-1), x.prod([0, 2], keepdim=True)), CUBE),
    "any_all": (lambda x: ((x > 0.5).any(), (x > 0.1).all(-1), (x > 0.5).any(1, keepdim=True)), CUBE),
    "logsumexp": (lambda x: (paddle.logsumexp(x), paddle.logsumexp(x, -1, keepdim=True)), CUBE),
    "arg": (lambda x: (x.argmax(), x.argmin(-1), x.argmax(1, keepdim=True, dtype="int32")), CUBE),
    "sort": (lambda x: (paddle.sort(x, -1), paddle.argsort(x, 1, descending=True)), CUBE),
    "topk": (lambda x: paddle.topk(x, 3, -1), CUBE),
    "topk_smallest": (lambda x: paddle.topk(x, 2, 1, largest=False), CUBE),
    "norm": (lambda x: (x.norm(), x.norm(1, -1), x.norm("fro", [1, 2]), x.norm(INF, 1, keepdim=True)), CUBE),
    "normalize": (lambda x: F.normalize(x, axis=1), CUBE),
    "variance": (lambda x: (x.var(-1), x.std(1, keepdim=True, unbiased=False)), CUBE),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, -1), XY),
    "softmax": (lambda x: (F.softmax(x, 1), F.log_softmax(x, -1)), CUBE),
    "cumsum": (lambda x: (x.cumsum(), x.cumsum(1), x.cumprod(-1)), CUBE),
    "matmul": (lambda x, y: (paddle.matmul(x, y, transpose_y=True), paddle.matmul(x, y, transpose_x=True)), XY),
    "matmul_vector": (lambda x: paddle.matmul(x, x[0]), X),
    "matmul_batch": (lambda x: paddle.matmul(x, x[0], transpose_y=True), CUBE),
    "bmm": (lambda x: paddle.bmm(x, x.transpose([0, 2, 1])), CUBE),
    "addmm": (lambda x, y: paddle.addmm(x, x, y[:, :6].t().matmul(y), 0.5, 2.0), XY),
    "dot": (lambda x, y: (paddle.dot(x[0], y[0]), paddle.mv(x, y[0]), paddle.outer(x[0], y[0])), XY),
    "kron": (lambda x, y: paddle.kron(x[:2], y[:3]), XY),
    "einsum": (lambda x: paddle.einsum("bij,bkj->bik", x, x), CUBE),
    "reshape": (lambda x: (x.reshape([0, -1]), x.reshape([-1, 3, 2]), x.reshape([x.shape[0], 24])), CUBE),
    "flatten": (lambda x: (x.flatten(), x.flatten(1), x.flatten(0, 1)), CUBE),
    "squeeze": (lambda x: (x.unsqueeze(1), x.unsqueeze([0, -1]), x[:, :1].squeeze(1), x.unsqueeze(0).squeeze(0)), CUBE),
    "transpose": (lambda x: (x.transpose([2, 0, 1]), x.swapaxes(1, 2)), CUBE),
    "concat": (lambda x, y: (paddle.concat([x, y], 0), paddle.concat([x, y, x], -1), paddle.stack([x, y], 1)), XY),
    "split": (lambda x: (*paddle.split(x, 3, -1), *paddle.split(x, [1, 2, -1], 1), *paddle.unbind(x, 1)), CUBE),
    "unstack": (lambda x: paddle.unstack(x, 2), CUBE),
    "slice": (lambda x: (x[:, 1:3], x[0], x[:, -1], x[..., 2:], x[:, ::2, 1:5:2], x[1:, 0]), CUBE),
    "expand": (lambda x: (x.unsqueeze(1).expand([-1, 3, 6]), x[:1].expand_as(x), x[0].broadcast_to([4, 6])), X),
    "tile": (lambda x: (x.tile([2, 1]), x.tile([2, 1, 3])), X),
    "flip": (lambda x: (x.flip([0, -1]), x.roll(2, 1), x.roll([1, -1], [0, 1]), x.roll(1)), X),
    "tril": (lambda x: (paddle.tril(x), paddle.triu(x, 1), paddle.diagonal(x, 1, -2, -1)), CUBE),
    "created": (lambda x: (paddle.arange(5), paddle.arange(0, 1, 0.25), paddle.eye(3), paddle.ones_like(x) * 2), X),
    "sized": (lambda x: (paddle.arange(paddle.shape(x)[0]), paddle.zeros([paddle.shape(x)[0], 3]), paddle.shape(x)), X),
    "sizes": (lambda x: x.reshape([paddle.shape(x)[0] * 2, 3]) * paddle.shape(x)[0].astype("float32"), X),
    "constants": (lambda x: x + paddle.to_tensor([[1.0, 2.5, -3.0, 0.0, INF, NAN]]) * paddle.to_tensor([2.0]), X),
    "whole_constants": (lambda x: x + paddle.to_tensor([1, 2, 3, 4, 5, 6]), WHOLE),
    "one_hot": (lambda x: F.one_hot(x, 7), WHOLE),
    "meshgrid": (lambda x: paddle.meshgrid(x[0], x[:, 0]), X),
    "gather": (
        lambda x: (paddle.gather(x, paddle.to_tensor([0, 2]), 1), x.index_select(paddle.to_tensor([1, 1]), 2)),
        CUBE,
    ),
    "gather_nd": (lambda x: paddle.gather_nd(x, paddle.to_tensor([[0, 1], [1, 3]])), CUBE),
    "take_along": (lambda x: paddle.take_along_axis(x, paddle.argsort(x, 1), 1), CUBE),
    "index_sample": (lambda x: paddle.index_sample(x, paddle.argsort(x, 1)[:, :2]), X),
    "repeat": (lambda x: paddle.repeat_interleave(x, 2, 1), CUBE),
    "masked": (lambda x: (paddle.masked_select(x, x > 0.5), paddle.nonzero(x > 0.5), x.masked_fill(x > 0.5, -1.0)), X),
    "pad": (lambda x: (F.pad(x, [1, 2]), F.pad(x, [1, 2], mode="reflect", data_format="NCL")), SIGNAL),
    "pad_2d": (
        lambda x: tuple(F.pad(x, [1, 2, 3, 0], mode=m) for m in ("constant", "reflect", "replicate", "circular")),
        IMAGE,
    ),
    "pad_all": (lambda x: F.pad(x, [1, 0, 2, 1], value=0.5), X),
    "interpolate": (lambda x: (F.interpolate(x, [5, 7], mode="bilinear"), F.interpolate(x, scale_factor=2)), IMAGE),
    "interpolate_aligned": (lambda x: F.interpolate(x, [16, 5], mode="bilinear", align_corners=True), IMAGE),
    "interpolate_scale": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), IMAGE),
    "bicubic": (
        lambda x: (F.interpolate(x, [5, 7], mode="bicubic"), F.interpolate(x, scale_factor=2, mode="bicubic")),
        IMAGE,
    ),
    "linear_interpolate": (lambda x: F.interpolate(x, [7], mode="linear", data_format="NCW"), SIGNAL),
    "trilinear": (lambda x: F.interpolate(x, [4, 5, 6], mode="trilinear", data_format="NCDHW"), VOLUME),
    "pixels": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), IMAGE),
    "unfold": (lambda x: F.unfold(x, [3, 2], strides=2, paddings=1), IMAGE),
    "pools": (
        lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, exclusive=False)),
        IMAGE,
    ),
    "ceil_pools": (lambda x: (F.max_pool2d(x, 3, 2, ceil_mode=True), F.avg_pool2d(x, 3, 2, ceil_mode=True)), IMAGE),
    "adaptive": (
        lambda x: (F.adaptive_avg_pool2d(x, [3, 4]), F.adaptive_max_pool2d(x, [3, 4]), F.adaptive_max_pool2d(x, 1)),
        IMAGE,
    ),
    "signal_pools": (lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 3, 2, 1), F.adaptive_avg_pool1d(x, 4)), SIGNAL),
    "volume_largest": (lambda x: (F.adaptive_max_pool3d(x, [2, 3, 4]), F.adaptive_max_pool3d(x, 1)), VOLUME),
    "embedding_padding": (lambda x: F.embedding(x, paddle.full([10, 4], 3.0), padding_idx=2), WHOLE),
    "broadcast_tensors": (lambda x, y: paddle.broadcast_tensors([x.unsqueeze(1), y[:1]]), XY),
    "volume_pools": (lambda x: (F.max_pool3d(x, 2), F.avg_pool3d(x, 2), F.adaptive_avg_pool3d(x, 2)), VOLUME),
    "attention_mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, paddle.zeros([1, 1, 6, 6])),
        (([None, 6, 2, 8], "float32"),),
    ),
    "bf16": (
        lambda x: (x * 0.3, (x * 3.0).astype("float32"), x.reshape([-1, 3]), paddle.concat([x, x])),
        (([None, 6], "bfloat16"),),
    ),
}


LAYERS: dict[str, Case] = {
    "conv": (lambda: Layers(nn.Conv2D(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))), IMAGE),
    "conv_groups": (lambda: Layers(nn.Conv2D(4, 8, 3, groups=2, padding=[1, 2])), IMAGE),
    "conv_uneven": (lambda: Layers(nn.Conv2D(4, 4, 3, padding=[1, 2, 0, 1])), IMAGE),
    "conv_same": (
        lambda: Layers(nn.Conv2D(4, 4, 3, stride=2, padding="SAME"), nn.Conv2D(4, 4, 2, padding="SAME")),
        IMAGE,
    ),
    "conv_valid": (lambda: Layers(nn.Conv2D(4, 4, 3, padding="VALID")), IMAGE),
    "conv_last": (
        lambda: Layers(nn.Conv2D(10, 4, 3, data_format="NHWC"), nn.BatchNorm2D(4, data_format="NHWC")),
        IMAGE,
    ),
    "conv_signal": (lambda: Layers(nn.Conv1D(4, 6, 3, padding=1, stride=2)), SIGNAL),
    "conv_volume": (lambda: Layers(nn.Conv3D(2, 4, 3, padding=1)), VOLUME),
    "conv_transpose": (lambda: Layers(nn.Conv2DTranspose(4, 6, 3, stride=2, padding=1, output_padding=1)), IMAGE),
    "conv_transpose_groups": (lambda: Layers(nn.Conv2DTranspose(4, 4, 3, groups=2, dilation=2)), IMAGE),
    "conv_transpose_depthwise": (lambda: Layers(nn.Conv2DTranspose(4, 4, 3, groups=4)), IMAGE),
    "conv_transpose_signal": (lambda: Layers(nn.Conv1DTranspose(4, 6, 3, stride=2)), SIGNAL),
    "conv_transpose_volume": (lambda: Layers(nn.Conv3DTranspose(2, 3, 2, stride=2)), VOLUME),
    "norms": (lambda: Layers(nn.GroupNorm(2, 4), nn.InstanceNorm2D(4), nn.BatchNorm2D(4)), IMAGE),
    "layer_norm": (lambda: Layers(nn.LayerNorm([4, 6]), nn.LayerNorm(6, weight_attr=False, bias_attr=False)), CUBE),
    "layer_norm_plain": (lambda: Layers(nn.LayerNorm(6, bias_attr=False)), CUBE),
    "embedding_padding": (lambda: Layers(nn.Embedding(10, 4, padding_idx=2)), WHOLE),
    "prelu_channels": (lambda: Layers(nn.PReLU(4, 0.1)), IMAGE),
    "written": (Written, X),
    "dropout_downscale": (lambda: Layers(nn.Dropout(0.25, mode="downscale_in_infer")), X),
    "bilinear_up": (lambda: Layers(nn.UpsamplingBilinear2D(scale_factor=2), nn.UpsamplingNearest2D([5, 4])), IMAGE),
}


def operator_cases() -> dict[str, Case]:
    """Return every case: a function that makes the layer, and the inputs that it is exported for."""
    made: dict[str, Case] = {f"layer_{name}": case for name, case in LAYERS.items()}
    for name, (function, shapes) in FUNCTIONS.items():
        kind = Function if len(shapes) == 1 else FunctionOfTwo
        made[f"op_{name}"] = (partial(kind, function), shapes)
    return made
