"""Rules of operators that read or write elements at places that other tensors name."""

from __future__ import annotations

from functools import partial

from holdfast.program.arguments import DtypeValue, Ref
from holdfast.sources.paddle.pir.pir_call import PirCall
from holdfast.sources.paddle.pir.pir_operands import Number, Operand, TensorOperand
from holdfast.sources.paddle.pir.pir_pointwise import Rule, as_dtype
from holdfast.sources.paddle.pir.pir_program import UNKNOWN, PirTensor

_NONE = -1  # no padding index


def _wide(call: PirCall, index: TensorOperand) -> TensorOperand:
    """Return indices as int64, which some aten operators need."""
    if index.type.dtype == "int64":
        return index
    kind = PirTensor("int64", index.type.shape)
    return call.emit("to.dtype", index.ref, DtypeValue("int64"), kind=kind, hint=index.shape)


def _embedding(call: PirCall) -> Operand:
    """Look up rows; those of the padding index are zeros, whatever the weight has there."""
    index, weight = call.tensor(0), call.tensor(1)
    call.ignore("sparse")
    hint = (*index.shape, weight.shape[-1])
    padding = call.attribute("padding_idx", int, _NONE)
    found = call.emit("embedding.default", weight.ref, index.ref, hint=hint)
    if padding == _NONE:
        return found
    flags = PirTensor("bool", index.type.shape)
    is_padding = call.emit("eq.Scalar", index.ref, padding, kind=flags, hint=index.shape)
    rows = call.emit("unsqueeze.default", is_padding.ref, -1, kind=PirTensor("bool", (*index.type.shape, 1)))
    return call.emit("masked_fill.Scalar", found.ref, rows.ref, 0, hint=hint)


def _gather(call: PirCall) -> Operand:
    x, index = call.tensor(0), call.tensor(1)
    axis = call.number(2) if call.count > 2 else call.attribute("axis", int, 0)
    whole = None if isinstance(axis, Ref) else as_dtype(axis, "int64")
    if type(whole) is not int or index.rank > 1:
        raise call.refuse("an axis that depends on sizes, or indices of several dims")
    place = call.axis(whole, x.rank)
    if index.rank == 1:
        hint = tuple(index.shape[0] if dim == place else size for dim, size in enumerate(x.shape))
        return call.emit("index_select.default", x.ref, place, index.ref, hint=hint)
    kind = PirTensor(x.type.dtype, tuple(1 if dim == place else size for dim, size in enumerate(x.type.shape)))
    row = call.emit("index_select.default", x.ref, place, index.ref, kind=kind)
    return call.emit("squeeze.dims", row.ref, (place,), hint=(*x.shape[:place], *x.shape[place + 1 :]))


def _index_select(call: PirCall) -> Operand:
    x, index = call.tensor(0), call.tensor(1)
    place = call.axis(call.attribute("axis", int, 0), x.rank)
    hint = tuple(index.shape[0] if dim == place else size for dim, size in enumerate(x.shape))
    return call.emit("index_select.default", x.ref, place, index.ref, hint=hint)


def _gather_nd(call: PirCall) -> Operand:
    """Index the first dims by the columns of the last dim of the indices."""
    x, index = call.tensor(0), _wide(call, call.tensor(1))
    count = index.type.shape[-1] if index.rank else UNKNOWN
    if count < 1 or count > x.rank:
        raise call.refuse(f"{count} indices of {x.rank} dims")
    kind = PirTensor("int64", index.type.shape[:-1])
    columns = tuple(call.emit("select.int", index.ref, -1, column, kind=kind).ref for column in range(count))
    return call.emit("index.Tensor", x.ref, columns, hint=(*index.shape[:-1], *x.shape[count:]))


def _take_along_axis(call: PirCall) -> Operand:
    x, index = call.tensor(0), _wide(call, call.tensor(1))
    return call.emit("gather.default", x.ref, call.axis(call.attribute("axis", int), x.rank), index.ref)


def _index_sample(call: PirCall) -> Operand:
    x, index = call.tensor(0), _wide(call, call.tensor(1))
    return call.emit("gather.default", x.ref, 1, index.ref, hint=index.shape)


def _repeat_interleave(call: PirCall) -> Operand:
    x = call.tensor(0)
    count, axis = call.attribute("repeats", int), call.attribute("axis", int)
    call.ignore("output_size")
    return call.emit("repeat_interleave.self_int", x.ref, count, call.axis(axis, x.rank))


def _masked(name: str, call: PirCall) -> Operand:
    x, mask = call.tensor(0), call.tensor(1)
    return call.emit(f"{name}.default", x.ref, mask.ref)


def _nonzero(call: PirCall) -> Operand:
    return call.emit("nonzero.default", call.tensor(0).ref)


def _diagonal(call: PirCall) -> Operand:
    x = call.tensor(0)
    offset, first, second = (call.attribute(name, int) for name in ("offset", "axis1", "axis2"))
    return call.emit("diagonal.default", x.ref, offset, call.axis(first, x.rank), call.axis(second, x.rank))


def _set_value(call: PirCall) -> Operand:
    """Write a tensor or a number into a range; later users of the input see what was written, as in Paddle."""
    x, is_tensor = call.tensor(0), call.operator.name == "pd_op.set_value_with_tensor_"
    first = 2 if is_tensor else 1
    begins, ends, steps = call.numbers(first), call.numbers(first + 1), call.whole_numbers(first + 2)
    axes, removed = call.integers("axes"), call.integers("decrease_axes", ())
    if call.integers("none_axes", ()) or len(axes) != 1 or len(begins) != 1 or len(ends) != 1 or steps != (1,):
        raise call.refuse("a write to other than a range of one axis")
    place = call.axis(axes[0], x.rank)
    range_kind = PirTensor(x.type.dtype, (UNKNOWN,) * x.rank)
    part = call.emit("slice.Tensor", x.ref, place, begins[0], ends[0], 1, kind=range_kind)
    if is_tensor:
        source = _in_place(call, call.tensor(1), place, x, bool(removed))
        filled = call.emit("expand_as.default", source, part.ref, kind=range_kind)
    else:
        filled = call.emit("full_like.default", part.ref, _single(call, x), kind=range_kind)
    written = call.emit("slice_scatter.default", x.ref, filled.ref, place, begins[0], ends[0], 1, hint=x.shape)
    call.builder.rebind(call.operator.inputs[0], call.operator.results[0].id, written)
    return written


def _single(call: PirCall, x: TensorOperand) -> Number:
    """Return the number that is written."""
    values = call.attribute("values", tuple)
    call.ignore("shape")
    value = values[0] if len(values) == 1 and isinstance(values[0], bool | int | float) else None
    number = None if value is None else as_dtype(value, x.type.dtype)
    if number is None:
        raise call.refuse(f"{len(values)} values for {x.type.dtype}")
    return number


def _in_place(call: PirCall, value: TensorOperand, place: int, x: TensorOperand, removed: bool) -> Ref:
    """Return a tensor that is written, with the dim back that indexing by a number removed."""
    call.same_dtype(x, value)
    behind = x.rank - place - 1  # the dims after that one
    if not removed or value.rank < behind:
        return value.ref
    shape = (UNKNOWN,) * (value.rank + 1)
    return call.emit("unsqueeze.default", value.ref, -behind - 1, kind=PirTensor(x.type.dtype, shape)).ref


INDEXING: dict[str, Rule] = {
    "pd_op.embedding": _embedding,
    "pd_op.gather": _gather,
    "pd_op.gather_nd": _gather_nd,
    "pd_op.index_select": _index_select,
    "pd_op.take_along_axis": _take_along_axis,
    "pd_op.index_sample": _index_sample,
    "pd_op.repeat_interleave": _repeat_interleave,
    "pd_op.masked_select": partial(_masked, "masked_select"),
    "pd_op.nonzero": _nonzero,
    "pd_op.diagonal": _diagonal,
    "pd_op.set_value_": _set_value,
    "pd_op.set_value_with_tensor_": _set_value,
}
