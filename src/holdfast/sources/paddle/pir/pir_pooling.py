"""Rules of pooling: the largest or the mean of windows, of windows that divide a tensor, and of whole dims."""

from __future__ import annotations

from holdfast.program.arguments import Value
from holdfast.sources.paddle.pir.pir_call import PirCall
from holdfast.sources.paddle.pir.pir_layers import ChannelsFirst, batch_of, spatial_padding
from holdfast.sources.paddle.pir.pir_operands import Operand
from holdfast.sources.paddle.pir.pir_pointwise import Rule


def _pool(call: PirCall) -> Operand:
    layout = ChannelsFirst(call)
    x, spatial = layout.x, layout.x.rank - 2
    call.same_dtype(x)
    kernel = call.whole_numbers(1) if call.count > 1 else call.integers("kernel_size")
    strides, kind = call.integers("strides"), call.attribute("pooling_type", str)
    ceil, exclusive = call.attribute("ceil_mode", bool), call.attribute("exclusive", bool)
    whole, adaptive = call.attribute("global_pooling", bool), call.attribute("adaptive", bool)
    call.require("pooling_type", "max", "avg")
    call.ignore("padding_algorithm", "paddings")
    if spatial not in (2, 3) or len(kernel) != spatial:
        raise call.refuse(f"windows of {len(kernel)} dims of a tensor of {x.rank}")
    if whole or (adaptive and set(kernel) == {1}):
        name, dims = ("amax.default" if kind == "max" else "mean.dim"), tuple(range(2, 2 + spatial))
        return layout.back(call.emit(name, x.ref, dims, True, kind=layout.kind, hint=(*x.shape[:2], *(1,) * spatial)))
    if adaptive and kind == "avg":
        return layout.back(
            call.emit(f"adaptive_avg_pool{spatial}d.default", x.ref, kernel, kind=layout.kind, hint=batch_of(x))
        )
    if adaptive:
        kinds = (layout.kind, layout.kind)
        return layout.back(
            call.several(f"adaptive_max_pool{spatial}d.default", (x.ref, kernel), kinds, hint=batch_of(x))[0]
        )
    pairs = spatial_padding(call, x, kernel, strides, (1,) * spatial)
    if any(before != after or 2 * before > size for (before, after), size in zip(pairs, kernel, strict=True)):
        raise call.refuse(f"the padding {pairs} of windows of {list(kernel)}")
    padding = tuple(before for before, _ in pairs)
    if kind == "max":
        largest: tuple[Value, ...] = (x.ref, kernel, strides, padding, (1,) * spatial, ceil)
        return layout.back(call.emit(f"max_pool{spatial}d.default", *largest, kind=layout.kind, hint=batch_of(x)))
    if ceil and any(padding):
        raise call.refuse("ceil_mode of a padded mean")
    args: tuple[Value, ...] = (x.ref, kernel, strides, padding, ceil, not exclusive)
    return layout.back(call.emit(f"avg_pool{spatial}d.default", *args, kind=layout.kind, hint=batch_of(x)))


def _largest_with_index(call: PirCall) -> Operand:
    """Return the largest of windows; the places of them, which are another result, count differently in Paddle."""
    x, kernel, strides = call.tensor(0), call.integers("kernel_size"), call.integers("strides")
    paddings, ceil = call.integers("paddings"), call.attribute("ceil_mode", bool, False)
    whole, adaptive = call.attribute("global_pooling", bool), call.attribute("adaptive", bool)
    call.same_dtype(x)
    spatial = x.rank - 2
    if spatial not in (2, 3) or not len(kernel) == len(strides) == len(paddings) == spatial:
        raise call.refuse(f"windows of {len(kernel)} dims of a tensor of {x.rank}")
    if whole or (adaptive and set(kernel) == {1}):
        hint = (*x.shape[:2], *(1,) * spatial)
        return call.emit("amax.default", x.ref, tuple(range(2, 2 + spatial)), True, hint=hint)
    if adaptive:
        kinds = (call.kind(), call.kind())
        return call.several(f"adaptive_max_pool{spatial}d.default", (x.ref, kernel), kinds, hint=batch_of(x))[0]
    if any(2 * before > size for before, size in zip(paddings, kernel, strict=True)):
        raise call.refuse(f"the padding {list(paddings)} of windows of {list(kernel)}")
    args: tuple[Value, ...] = (x.ref, kernel, strides, paddings, (1,) * spatial, ceil)
    return call.emit(f"max_pool{spatial}d.default", *args, hint=batch_of(x))


POOLING: dict[str, Rule] = {
    "pd_op.pool2d": _pool,
    "pd_op.pool3d": _pool,
    "pd_op.max_pool2d_with_index": _largest_with_index,
    "pd_op.max_pool3d_with_index": _largest_with_index,
}
