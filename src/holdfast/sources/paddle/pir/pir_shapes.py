"""Rules of operators that change shapes: reshape, permute, join, split, cut, repeat."""

from __future__ import annotations

from holdfast.program.arguments import Ref
from holdfast.sources.paddle.pir.pir_call import PirCall
from holdfast.sources.paddle.pir.pir_creation import size_shape
from holdfast.sources.paddle.pir.pir_operands import (
    ListOperand,
    Number,
    NumbersOperand,
    Operand,
    Shape,
    TensorOperand,
)
from holdfast.sources.paddle.pir.pir_pointwise import Rule, as_dtype
from holdfast.sources.paddle.pir.pir_program import UNKNOWN, PirTensor

__all__ = ["SHAPES", "Rule"]

_END = 2**31 - 1  # the end of a slice that has none


def _reshape(call: PirCall) -> Operand:
    """Reshape: a 0 is the size of the same dim of the input, -1 what is left."""
    operand = call.operand(0)
    sizes = list(call.numbers(1))
    if isinstance(operand, NumbersOperand) and len(sizes) < 2:
        return NumbersOperand(operand.values, call.kind())
    x = call.tensor(0)
    for dim, size in enumerate(sizes):
        if isinstance(size, Ref):
            continue
        if type(size) is not int or (size == 0 and dim >= x.rank):
            raise call.refuse(f"the size {size!r} of the dim {dim}")
        if size == 0:
            sizes[dim] = call.builder.size(x, dim)
    if sum(1 for size in sizes if isinstance(size, Ref)) == 1 and -1 not in sizes:
        hint = size_shape(call, tuple(sizes))
        sizes = [-1 if isinstance(size, Ref) else size for size in sizes]
        return call.emit("reshape.default", x.ref, tuple(sizes), hint=hint)
    return call.emit("reshape.default", x.ref, tuple(sizes), hint=size_shape(call, tuple(sizes)))


def _transpose(call: PirCall) -> Operand:
    x, order = call.tensor(0), call.integers("perm")
    axes = tuple(call.axis(axis, x.rank) for axis in order)
    if sorted(axes) != list(range(x.rank)):
        raise call.refuse(f"the order {list(order)[:20]} of {x.rank} dims")
    return call.emit("permute.default", x.ref, axes, hint=tuple(x.shape[axis] for axis in axes))


def _squeeze(call: PirCall) -> Operand:
    operand = call.operand(0)
    if isinstance(operand, NumbersOperand) and len(operand.values) == 1:
        return NumbersOperand(operand.values, call.kind())
    x, axes = call.tensor(0), call.whole_numbers(1)
    if not axes and UNKNOWN in x.type.shape:
        raise call.refuse("without axes on dims of unknown sizes")
    chosen = [call.axis(axis, x.rank) for axis in axes] or range(x.rank)
    dims = tuple(dim for dim in chosen if x.type.shape[dim] == 1)
    if any(x.type.shape[dim] == UNKNOWN for dim in chosen):
        raise call.refuse("of a dim of an unknown size")
    hint = tuple(size for dim, size in enumerate(x.shape) if dim not in dims)
    return call.emit("squeeze.dims", x.ref, dims, hint=hint)


def _unsqueeze(call: PirCall) -> Operand:
    operand, axes = call.operand(0), call.whole_numbers(1)
    if isinstance(operand, NumbersOperand) and operand.rank == 0 and len(axes) == 1:
        return NumbersOperand(operand.values, call.kind())
    x = call.tensor(0)
    shape, ref, rank = list(x.shape), x.ref, x.rank
    for index, axis in enumerate(axes):
        place = call.axis(axis, rank + 1)
        shape.insert(place, 1)
        rank += 1
        kind = call.kind() if index == len(axes) - 1 else _open(x, rank)
        ref = call.emit("unsqueeze.default", ref, place, kind=kind, hint=tuple(shape)).ref
    return x if not axes else TensorOperand(ref, call.kind(), tuple(shape))


def _open(x: TensorOperand, rank: int) -> PirTensor:
    return PirTensor(x.type.dtype, (UNKNOWN,) * rank)


def _flatten(call: PirCall) -> Operand:
    x = call.tensor(0)
    if x.rank == 0:
        return call.emit("reshape.default", x.ref, (1,))
    begin, end = (call.axis(call.attribute(name, int), x.rank) for name in ("start_axis", "stop_axis"))
    middle: Shape = (x.shape[begin],) if begin == end else (None,)
    return call.emit("flatten.using_ints", x.ref, begin, end, hint=(*x.shape[:begin], *middle, *x.shape[end + 1 :]))


def _concat(call: PirCall) -> Operand:
    operand, axis = call.operand(0), call.number(1)
    numbers = _all_numbers(operand)
    if numbers is not None and call.kind().shape:
        return NumbersOperand(numbers, call.kind())
    parts = call.tensors(0)
    call.same_dtype(*parts)
    whole = None if isinstance(axis, Ref) else as_dtype(axis, "int64")
    if type(whole) is not int:
        raise call.refuse("an axis that depends on sizes")
    place = call.axis(whole, parts[0].rank)
    hint = tuple(None if dim == place else size for dim, size in enumerate(parts[0].shape))
    return call.emit("cat.default", tuple(part.ref for part in parts), place, hint=hint)


def _all_numbers(operand: Operand | None) -> tuple[Number | Ref, ...] | None:
    """Return the elements of a list of numbers of one dim or none; None if there is a tensor among them."""
    items = operand.items if isinstance(operand, ListOperand) else (operand,)
    numbers = [item for item in items if isinstance(item, NumbersOperand)]
    return tuple(value for item in numbers for value in item.values) if len(numbers) == len(items) else None


def _stack(call: PirCall) -> Operand:
    axis = call.attribute("axis", int, 0)
    numbers = _all_numbers(call.operand(0))
    if numbers is not None and len(call.kind().shape) == 1:
        return NumbersOperand(numbers, call.kind())
    parts = call.tensors(0)
    call.same_dtype(*parts)
    place = call.axis(axis, parts[0].rank + 1)
    shape = parts[0].shape
    hint = (*shape[:place], len(parts), *shape[place:])
    return call.emit("stack.default", tuple(part.ref for part in parts), place, hint=hint)


def _split(call: PirCall) -> Operand:
    x, sections, axis = call.tensor(0), list(call.whole_numbers(1)), call.whole_numbers(2)
    place = call.axis(axis[0], x.rank)
    if UNKNOWN in sections:
        if sections.count(UNKNOWN) > 1 or x.type.shape[place] == UNKNOWN:
            raise call.refuse(f"the sections {sections} of a dim of an unknown size")
        sections[sections.index(UNKNOWN)] = x.type.shape[place] - sum(sections) - 1
    return _parts(call, x, tuple(sections), place)


def _parts(call: PirCall, x: TensorOperand, sections: tuple[int, ...], place: int) -> Operand:
    hint = tuple(None if dim == place else size for dim, size in enumerate(x.shape))
    args = (x.ref, sections, place)
    return call.builder.emit_several("aten.split_with_sizes.default", args, call.kinds(), hint=hint)


def _split_evenly(call: PirCall) -> Operand:
    x, count, axis = call.tensor(0), call.attribute("num", int), call.whole_numbers(1)
    place = call.axis(axis[0], x.rank)
    size = x.type.shape[place]
    if size == UNKNOWN or count < 1 or size % count:
        raise call.refuse(f"{count} parts of a dim of size {size}")
    return _parts(call, x, (size // count,) * count, place)


def _unbind(call: PirCall) -> Operand:
    x = call.tensor(0)
    place = call.axis(call.attribute("axis", int, 0), x.rank)
    call.ignore("num")
    hint = (*x.shape[:place], *x.shape[place + 1 :])
    return call.builder.emit_several("aten.unbind.int", (x.ref, place), call.kinds(), hint=hint)


def _slice(call: PirCall) -> Operand:
    """Cut ranges out of some axes, and remove those of `decrease_axis`."""
    axes, removed = call.integers("axes"), call.integers("decrease_axis", ())
    call.ignore("infer_flags")
    operand, begins, ends = call.operand(0), call.numbers(1), call.numbers(2)
    if len(begins) != len(axes) or len(ends) != len(axes):
        raise call.refuse(f"{len(begins)} and {len(ends)} bounds of {len(axes)} axes")
    if isinstance(operand, NumbersOperand):
        return _slice_of_numbers(call, operand, begins, ends)
    x = call.tensor(0)
    places = tuple(call.axis(axis, x.rank) for axis in axes)
    dims = tuple(call.axis(axis, x.rank) for axis in removed)
    shape = list(x.shape)
    for place, begin, end in zip(places, begins, ends, strict=True):
        shape[place] = 1 if place in dims else None
        last = _END if end == _END else end
        x = call.emit("slice.Tensor", x.ref, place, begin, last, 1, kind=_open(x, x.rank), hint=tuple(shape))
    if not removed:
        return TensorOperand(x.ref, call.kind(), x.shape)
    hint = tuple(size for dim, size in enumerate(shape) if dim not in dims)
    return call.emit("squeeze.dims", x.ref, dims, hint=hint)


def _slice_of_numbers(
    call: PirCall, operand: NumbersOperand, begins: tuple[Number | Ref, ...], ends: tuple[Number | Ref, ...]
) -> Operand:
    if operand.rank != 1 or len(begins) != 1 or type(begins[0]) is not int or type(ends[0]) is not int:
        raise call.refuse("a slice of sizes between bounds that are not numbers")
    return NumbersOperand(operand.values[begins[0] : ends[0]], call.kind())


def _strided_slice(call: PirCall) -> Operand:
    x, axes = call.tensor(0), call.integers("axes")
    begins, ends, steps = call.numbers(1), call.numbers(2), call.whole_numbers(3)
    if not len(axes) == len(begins) == len(ends) == len(steps) or min(steps, default=1) < 1:
        raise call.refuse(f"the steps {list(steps)[:20]}")
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        x = call.emit("slice.Tensor", x.ref, call.axis(axis, x.rank), begin, end, step, kind=_open(x, x.rank))
    return TensorOperand(x.ref, call.kind(), tuple(None if size < 0 else size for size in call.kind().shape))


def _expand(call: PirCall) -> Operand:
    x, sizes = call.tensor(0), call.numbers(1)
    return call.emit("expand.default", x.ref, sizes, hint=size_shape(call, sizes))


def _expand_as(call: PirCall) -> Operand:
    x, target = call.tensor(0), call.maybe_tensor(1)
    call.ignore("target_shape")
    if target is None:
        raise call.refuse("without a tensor of the shape")
    return call.emit("expand_as.default", x.ref, target.ref, hint=target.shape)


def _tile(call: PirCall) -> Operand:
    x, counts = call.tensor(0), call.numbers(1)
    return call.emit("tile.default", x.ref, counts)


def _flip(call: PirCall) -> Operand:
    x = call.tensor(0)
    return call.emit("flip.default", x.ref, call.integers("axis"), hint=x.shape)


def _roll(call: PirCall) -> Operand:
    x, shifts = call.tensor(0), call.whole_numbers(1)
    return call.emit("roll.default", x.ref, shifts, call.integers("axis", ()), hint=x.shape)


def _broadcast_tensors(call: PirCall) -> Operand:
    parts = tuple(part.ref for part in call.tensors(0))
    return call.builder.emit_several("aten.broadcast_tensors.default", (parts,), call.kinds())


SHAPES: dict[str, Rule] = {
    "pd_op.reshape": _reshape,
    "pd_op.transpose": _transpose,
    "pd_op.squeeze": _squeeze,
    "pd_op.unsqueeze": _unsqueeze,
    "pd_op.flatten": _flatten,
    "pd_op.concat": _concat,
    "pd_op.stack": _stack,
    "pd_op.split": _split,
    "pd_op.split_with_num": _split_evenly,
    "pd_op.unbind": _unbind,
    "pd_op.unstack": _unbind,
    "pd_op.slice": _slice,
    "pd_op.strided_slice": _strided_slice,
    "pd_op.expand": _expand,
    "pd_op.expand_as": _expand_as,
    "pd_op.tile": _tile,
    "pd_op.flip": _flip,
    "pd_op.roll": _roll,
    "pd_op.broadcast_tensors": _broadcast_tensors,
}
