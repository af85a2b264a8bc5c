"""Rules of layers: convolutions, normalizations, dropout of evaluation, padding, interpolation, pixel shuffles."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.program.arguments import Ref, Value
from holdfast.sources.paddle.pir.pir_call import PirCall
from holdfast.sources.paddle.pir.pir_operands import Operand, Shape, TensorOperand, elements
from holdfast.sources.paddle.pir.pir_pointwise import Rule, as_dtype
from holdfast.sources.paddle.pir.pir_program import UNKNOWN, PirTensor

CHANNELS_FIRST = ("NCHW", "NCL", "NCDHW", "NC", "AnyLayout", "Undefined(AnyLayout)")
_CHANNELS_LAST = ("NHWC", "NLC", "NDHWC")


class ChannelsFirst:
    """A tensor whose channels are moved to dim 1, where aten has them, and back in the result."""

    def __init__(self, call: PirCall) -> None:
        self._call = call
        name = call.attribute("data_format", str, "NCHW")
        if name not in (*CHANNELS_FIRST, *_CHANNELS_LAST):
            raise call.refuse(f"the data format {name!r}")
        self._last = name in _CHANNELS_LAST
        x = call.tensor(0)
        rank = x.rank
        self._front = (0, rank - 1, *range(1, rank - 1))
        self._back = (0, *range(2, rank), 1)
        self.x = x if not self._last or rank < 3 else self._permuted(x, self._front)

    def _permuted(self, x: TensorOperand, order: tuple[int, ...]) -> TensorOperand:
        kind = PirTensor(x.type.dtype, tuple(x.type.shape[dim] for dim in order))
        hint = tuple(x.shape[dim] for dim in order)
        return self._call.emit("permute.default", x.ref, order, kind=kind, hint=hint)

    @property
    def kind(self) -> PirTensor:
        """The type of the result with channels in front."""
        kind = self._call.kind()
        if not self._last or len(kind.shape) < 3:
            return kind
        return PirTensor(kind.dtype, tuple(kind.shape[dim] for dim in self._front))

    def back(self, result: TensorOperand) -> TensorOperand:
        """Return a result with the channels where the call has them."""
        return self._permuted(result, self._back) if self._last and result.rank >= 3 else result


def spatial_padding(
    call: PirCall, x: TensorOperand, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial dim."""
    algorithm, paddings = call.attribute("padding_algorithm", str, "EXPLICIT"), call.integers("paddings")
    count = len(kernel)
    if algorithm == "VALID":
        return [(0, 0)] * count
    if algorithm == "EXPLICIT" and len(paddings) == count:
        return [(size, size) for size in paddings]
    if algorithm == "EXPLICIT" and len(paddings) == 2 * count:
        return list(zip(paddings[::2], paddings[1::2], strict=True))
    if algorithm != "SAME":
        raise call.refuse(f"the padding {algorithm[:40]} {list(paddings)}")
    pairs = []
    for dim, (size, stride) in enumerate(zip(kernel, strides, strict=True)):
        length = x.type.shape[2 + dim]
        if length == UNKNOWN and stride != 1:
            raise call.refuse("the padding SAME of a dim of an unknown size")
        steps = 1 if length == UNKNOWN else -(-length // stride)
        missing = size - 1 if length == UNKNOWN else max((steps - 1) * stride + size - length, 0)
        pairs.append((missing // 2, missing - missing // 2))
    del dilations
    return pairs


def batch_of(x: TensorOperand) -> Shape:
    """Return the sizes of a result that has the batch of a tensor, and other sizes."""
    return (x.shape[0], *(None,) * (x.rank - 1))


def _convolution(call: PirCall) -> Operand:
    layout = ChannelsFirst(call)
    x, weight = layout.x, call.tensor(1)
    call.same_dtype(x, weight)
    call.ignore("is_test", "use_cudnn")
    strides, dilations = call.integers("strides"), call.integers("dilations")
    kernel, spatial = weight.type.shape[2:], x.rank - 2
    if spatial not in (1, 2, 3) or not len(kernel) == len(strides) == len(dilations) == spatial:
        raise call.refuse(f"{spatial} spatial dims")
    if call.operator.attributes.get("padding_algorithm") == "SAME":
        dilations = (1,) * spatial  # as Paddle does
    pairs = spatial_padding(call, x, kernel, strides, dilations)
    x, padding = pad_unevenly(call, x, pairs)
    groups = call.attribute("groups", int, 1)
    args: tuple[Value, ...] = (x.ref, weight.ref, None, strides, padding, dilations, groups)
    return layout.back(call.emit(f"conv{spatial}d.default", *args, kind=layout.kind, hint=batch_of(x)))


def pad_unevenly(
    call: PirCall, x: TensorOperand, pairs: list[tuple[int, int]], value: float = 0.0
) -> tuple[TensorOperand, tuple[int, ...]]:
    """Return a tensor and its even padding; uneven padding is added by a node."""
    if all(before == after for before, after in pairs):
        return x, tuple(before for before, _ in pairs)
    widths = tuple(width for pair in reversed(pairs) for width in pair)
    shape = list(x.type.shape)
    for dim, (before, after) in enumerate(pairs):
        if shape[2 + dim] != UNKNOWN:
            shape[2 + dim] += before + after
    kind = PirTensor(x.type.dtype, tuple(shape))
    padded = call.emit("constant_pad_nd.default", x.ref, widths, value, kind=kind, hint=batch_of(x))
    return padded, (0,) * len(pairs)


def _transposed_convolution(call: PirCall) -> Operand:
    layout = ChannelsFirst(call)
    x, weight = layout.x, call.tensor(1)
    call.same_dtype(x, weight)
    strides, dilations = call.integers("strides"), call.integers("dilations")
    extra, sizes = call.integers("output_padding", ()), _output_size(call)
    spatial, kernel = x.rank - 2, weight.type.shape[2:]
    if spatial not in (1, 2, 3) or sizes:
        raise call.refuse(f"{spatial} spatial dims and the output size {list(sizes)}")
    if call.operator.attributes.get("padding_algorithm") == "SAME":
        raise call.refuse("the padding SAME")
    pairs = spatial_padding(call, x, kernel, strides, dilations)
    if any(before != after for before, after in pairs):
        raise call.refuse("uneven padding")
    padding = tuple(before for before, _ in pairs)
    more, groups = extra or (0,) * spatial, call.attribute("groups", int, 1)
    name = "conv_transpose1d.default" if spatial == 1 else f"conv_transpose{spatial}d.input"
    args: tuple[Value, ...] = (x.ref, weight.ref, None, strides, padding, more, groups, dilations)
    return layout.back(call.emit(name, *args, kind=layout.kind, hint=batch_of(x)))


def _output_size(call: PirCall) -> tuple[int, ...]:
    call.ignore("output_size")
    return call.whole_numbers(2) if call.count > 2 and call.operand(2) is not None else call.integers("output_size", ())


def _batch_norm(call: PirCall) -> Operand:
    """Normalize by the running statistics: in training mode they would be updated, and differently than in torch."""
    if not (call.attribute("is_test", bool) or call.attribute("use_global_stats", bool)):
        raise call.refuse("training mode")
    call.ignore("momentum", "trainable_statistics", "use_global_stats")
    layout = ChannelsFirst(call)
    mean, variance, weight, bias = (call.maybe_ref(index) for index in range(1, 5))
    epsilon = call.attribute("epsilon", float)
    args: tuple[Value, ...] = (layout.x.ref, weight, bias, mean, variance, False, 0.0, epsilon, False)
    return layout.back(call.emit("batch_norm.default", *args, kind=layout.kind, hint=layout.x.shape))


def _layer_norm(call: PirCall) -> Operand:
    x, begin = call.tensor(0), call.attribute("begin_norm_axis", int, 1)
    normalized = x.type.shape[call.axis(begin, x.rank) :]
    if UNKNOWN in normalized or not normalized:
        raise call.refuse("the normalization of dims of unknown sizes")
    affine: list[Ref | None] = []
    for index in (1, 2):
        weight = call.maybe_tensor(index)
        if weight is not None and weight.type.dtype != x.type.dtype:
            raise call.refuse(f"weights of {weight.type.dtype} for {x.type.dtype}")
        if weight is not None and weight.type.shape != normalized:
            if elements(weight.type.shape) != elements(normalized):
                raise call.refuse(f"weights of the shape {list(weight.type.shape)}")
            kind = PirTensor(weight.type.dtype, normalized)
            weight = call.emit("reshape.default", weight.ref, normalized, kind=kind)
        affine.append(None if weight is None else weight.ref)
    epsilon = call.attribute("epsilon", float)
    return call.emit("layer_norm.default", x.ref, normalized, *affine, epsilon, False, hint=x.shape)


def _group_norm(call: PirCall) -> Operand:
    layout = ChannelsFirst(call)
    groups, epsilon = call.attribute("groups", int), call.attribute("epsilon", float)
    weight, bias = call.maybe_ref(1), call.maybe_ref(2)
    args: tuple[Value, ...] = (layout.x.ref, groups, weight, bias, epsilon, False)
    return layout.back(call.emit("group_norm.default", *args, kind=layout.kind, hint=layout.x.shape))


def _instance_norm(call: PirCall) -> Operand:
    x, weight, bias = call.tensor(0), call.maybe_ref(1), call.maybe_ref(2)
    call.same_dtype(x)
    epsilon = call.attribute("epsilon", float)
    args: tuple[Value, ...] = (x.ref, weight, bias, None, None, True, 0.0, epsilon, False)
    return call.emit("instance_norm.default", *args, hint=x.shape)


def _dropout(call: PirCall) -> Operand:
    """Pass the input through: only dropout of evaluation has the same result in both."""
    if not call.attribute("is_test", bool):
        raise call.refuse("training mode")
    call.ignore("seed", "fix_seed")
    x = call.tensor(0)
    if call.attribute("mode", str) == "upscale_in_train":
        return x
    call.require("mode", "upscale_in_train", "downgrade_in_infer")
    rate = call.number(2)
    if isinstance(rate, Ref):
        raise call.refuse("a rate that depends on sizes")
    kept = as_dtype(1.0 - float(rate.real), x.type.dtype)
    return call.emit("mul.Scalar", x.ref, kept, hint=x.shape)


def _pad(call: PirCall) -> Operand:
    """Pad every dim with a value: widths are from the first dim to the last."""
    x, widths = call.tensor(0), call.integers("paddings")
    call.same_dtype(x)
    value = call.number(1) if call.count > 1 else call.attribute("pad_value", float)
    number = None if isinstance(value, Ref) else as_dtype(value, x.type.dtype)
    if number is None or len(widths) != 2 * x.rank:
        raise call.refuse(f"{len(widths)} widths of {x.rank} dims, or a value that is not {x.type.dtype}")
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    flat = tuple(width for pair in reversed(pairs) for width in pair)
    return call.emit("constant_pad_nd.default", x.ref, flat, number)


_PAD_MODES = frozenset({"constant", "reflect", "replicate", "circular"})


def _pad3d(call: PirCall) -> Operand:
    """Pad the three spatial dims: widths are from the last dim to the first."""
    layout = ChannelsFirst(call)
    widths, mode = call.whole_numbers(1), call.attribute("mode", str)
    value = as_dtype(call.attribute("pad_value", float), layout.x.type.dtype)
    if mode not in _PAD_MODES or layout.x.rank != 5 or len(widths) != 6 or value is None:
        raise call.refuse(f"the mode {mode[:40]!r} and {len(widths)} widths")
    if mode == "constant":
        args: tuple[Value, ...] = (layout.x.ref, widths, value)
        return layout.back(call.emit("constant_pad_nd.default", *args, kind=layout.kind, hint=batch_of(layout.x)))
    return layout.back(call.emit("pad.default", layout.x.ref, widths, mode, kind=layout.kind, hint=batch_of(layout.x)))


def _interpolate(name: str, call: PirCall) -> Operand:
    """Resize to sizes or by factors of the attributes."""
    layout = ChannelsFirst(call)
    spatial = layout.x.rank - 2
    if any(call.operand(index) is not None for index in range(1, call.count)):
        raise call.refuse("sizes that are computed")
    call.ignore("interp_method", "out_d", "out_h", "out_w")
    attributes = {axis: call.attribute(f"out_{axis}", int, UNKNOWN) for axis in "dhw"}
    sizes = tuple(attributes[axis] for axis in "dhw"[-spatial:])
    factors = tuple(float(value) for value in call.attribute("scale", tuple, ()) if isinstance(value, int | float))
    aligned, mode = call.attribute("align_corners", bool), call.attribute("align_mode", int, 1)
    if name != "nearest" and not aligned and mode != 0:
        raise call.refuse("align_mode=1")
    if name == "nearest" and aligned:
        raise call.refuse("align_corners")
    if min(sizes) < 1 and len(factors) != spatial:
        raise call.refuse("neither sizes nor factors")
    by_factor = min(sizes) < 1
    corners: tuple[Value, ...] = () if name == "nearest" else (aligned,)
    args: tuple[Value, ...] = (layout.x.ref, None if by_factor else sizes, *corners, factors if by_factor else None)
    return layout.back(call.emit(f"upsample_{name}{spatial}d.vec", *args, kind=layout.kind, hint=batch_of(layout.x)))


def _pixel_shuffle(name: str, attribute: str, call: PirCall) -> Operand:
    layout = ChannelsFirst(call)
    factor = call.attribute(attribute, int)
    return layout.back(call.emit(f"{name}.default", layout.x.ref, factor, kind=layout.kind, hint=batch_of(layout.x)))


def _unfold(call: PirCall) -> Operand:
    x = call.tensor(0)
    kernel, strides, dilations = (call.integers(name) for name in ("kernel_sizes", "strides", "dilations"))
    paddings = call.integers("paddings")
    if len(paddings) == 4 and (paddings[0] != paddings[2] or paddings[1] != paddings[3]):
        raise call.refuse("uneven padding")
    return call.emit("im2col.default", x.ref, kernel, dilations, paddings[:2], strides)


def _bilinear(call: PirCall) -> Operand:
    name = "bilinear" if call.tensor(0).rank == 4 else "linear"
    return _interpolate(name, call)


LAYERS: dict[str, Rule] = {
    "pd_op.conv2d": _convolution,
    "pd_op.conv3d": _convolution,
    "pd_op.depthwise_conv2d": _convolution,
    "pd_op.conv2d_transpose": _transposed_convolution,
    "pd_op.conv3d_transpose": _transposed_convolution,
    "pd_op.depthwise_conv2d_transpose": _transposed_convolution,
    "pd_op.batch_norm_": _batch_norm,
    "pd_op.layer_norm": _layer_norm,
    "pd_op.group_norm": _group_norm,
    "pd_op.instance_norm": _instance_norm,
    "pd_op.dropout": _dropout,
    "pd_op.pad": _pad,
    "pd_op.pad3d": _pad3d,
    "pd_op.bilinear_interp": _bilinear,
    "pd_op.linear_interp": _bilinear,
    "pd_op.nearest_interp": lambda call: _interpolate("nearest", call),
    "pd_op.bicubic_interp": lambda call: _interpolate("bicubic", call),
    "pd_op.trilinear_interp": lambda call: _interpolate("trilinear", call),
    "pd_op.pixel_shuffle": lambda call: _pixel_shuffle("pixel_shuffle", "upscale_factor", call),
    "pd_op.pixel_unshuffle": lambda call: _pixel_shuffle("pixel_unshuffle", "downscale_factor", call),
    "pd_op.unfold": _unfold,
}
