"""Rules of operators that make tensors: filled ones, ranges, constants, and the shape of a tensor."""

from __future__ import annotations

from functools import partial

import numpy as np

from holdfast.program.arguments import DtypeValue, Ref
from holdfast.sources.paddle.pir.pir_call import PirCall, made_like
from holdfast.sources.paddle.pir.pir_operands import (
    ListOperand,
    NumbersOperand,
    Operand,
    Shape,
    elements,
)
from holdfast.sources.paddle.pir.pir_pointwise import Rule, as_dtype
from holdfast.sources.paddle.pir.pir_program import UNKNOWN, PirTensor

_NUMBERS = 64  # the most elements of a tensor whose values are followed
_CONSTANT = 1_000_000  # elements of a constant in the JSON


def _full(call: PirCall) -> Operand:
    kind = call.kind()
    call.ignore("dtype", "shape")
    value = call.operator.attributes.get("value")
    call.ignore("value")
    number = as_dtype(value, kind.dtype) if isinstance(value, int | float | complex) else None
    if number is None or UNKNOWN in kind.shape:
        raise call.refuse(f"the value {str(value)[:80]} of {kind.dtype} and the shape {list(kind.shape)}")
    if len(kind.shape) < 2 and elements(kind.shape) <= _NUMBERS:
        return NumbersOperand((number,) * elements(kind.shape), kind)
    return call.builder.emit("aten.full.default", (kind.shape, number), made_like(kind.dtype), kind)


def _full_int_array(call: PirCall) -> Operand:
    kind = call.kind()
    call.ignore("dtype")
    return NumbersOperand(call.integers("value"), kind)


def _full_like(call: PirCall) -> Operand:
    x, value = call.tensor(0), call.number(1)
    kind = call.kind()
    call.ignore("dtype")
    number = None if isinstance(value, Ref) else as_dtype(value, kind.dtype)
    if number is None:
        raise call.refuse(f"a value that is not {kind.dtype}")
    return call.emit("full_like.default", x.ref, number, dtype=DtypeValue(kind.dtype), hint=x.shape)


def size_shape(call: PirCall, sizes: tuple[object, ...]) -> Shape:
    """Return sizes as part of a type."""
    return tuple(call.builder.size_name(size) for size in sizes)  # type: ignore[arg-type]


def _full_with_tensor(call: PirCall) -> Operand:
    value, shape, kind = call.number(0), call.numbers(1), call.kind()
    call.ignore("dtype")
    number = None if isinstance(value, Ref) else as_dtype(value, kind.dtype)
    if number is None:
        raise call.refuse(f"a value that is not {kind.dtype}")
    hint = size_shape(call, shape)
    return call.builder.emit("aten.full.default", (shape, number), made_like(kind.dtype), kind, hint)


def _assign_value(call: PirCall) -> Operand:
    kind = call.kind()
    call.ignore("dtype")
    shape, values = call.integers("shape"), call.attribute("values", tuple)
    numbers = [as_dtype(value, kind.dtype) for value in values if isinstance(value, bool | int | float | complex)]
    known = [number for number in numbers if number is not None]
    if min(shape, default=0) < 0 or len(known) != len(values) or elements(shape) != len(known):
        raise call.refuse(f"{len(values)} values of {kind.dtype} for the shape {list(shape)}")
    if kind.dtype == "bfloat16" or len(known) > _CONSTANT:
        raise call.refuse(f"a constant of {len(known)} values of {kind.dtype}")
    if len(shape) < 2 and 0 < len(known) <= _NUMBERS:
        return NumbersOperand(tuple(known), PirTensor(kind.dtype, shape))
    return call.builder.constant(np.array(known, kind.dtype).reshape(shape), PirTensor(kind.dtype, shape))


def _arange(call: PirCall) -> Operand:
    kind = call.kind()
    call.ignore("dtype")
    bounds = tuple(call.number(index) for index in range(3))
    values = tuple(value if isinstance(value, Ref) else as_dtype(value, kind.dtype) for value in bounds)
    if None in values or (kind.dtype not in ("int32", "int64", "float32", "float64")):
        raise call.refuse(f"bounds that are not {kind.dtype}")
    return call.builder.emit("aten.arange.start_step", values, made_like(kind.dtype), kind)


def _eye(call: PirCall) -> Operand:
    kind = call.kind()
    call.ignore("dtype")
    rows, columns = (call.number(index) if index < call.count else None for index in range(2))
    if rows is None:
        raise call.refuse("no number of rows")
    if columns is None or columns == -1:
        columns = rows
    whole = tuple(value if isinstance(value, Ref) else as_dtype(value, "int64") for value in (rows, columns))
    return call.builder.emit("aten.eye.m", whole, made_like(kind.dtype), kind)


def _shape(call: PirCall) -> Operand:
    """Return the sizes of a tensor as numbers."""
    operand = call.operand(0)
    kind = call.kind()
    if isinstance(operand, NumbersOperand):
        return NumbersOperand(operand.type.shape, kind)
    x = call.tensor(0)
    return NumbersOperand(tuple(call.builder.size(x, dim) for dim in range(x.rank)), kind)


def _numel(call: PirCall) -> Operand:
    x = call.tensor(0)
    total: int | Ref = elements(tuple(size for size in x.type.shape if size != UNKNOWN))
    for dim, size in enumerate(x.type.shape):
        if size == UNKNOWN:
            total = call.builder.compute_size("mul", total, call.builder.size(x, dim))
    return NumbersOperand((total,), call.kind())


def _same(call: PirCall) -> Operand:
    operand = call.operand(0)
    if operand is None:
        raise call.refuse("the input is missing")
    call.ignore("output")
    return operand


def _tril_triu(name: str, call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    return call.emit(f"{name}.default", x.ref, call.attribute("diagonal", int, 0), hint=x.shape)


def _combine(call: PirCall) -> Operand:
    return ListOperand(tuple(call.operand(index) for index in range(call.count)))


def _split_list(call: PirCall) -> tuple[Operand, ...]:
    operand = call.operand(0)
    items = operand.items if isinstance(operand, ListOperand) else ()
    found = tuple(item for item in items if item is not None)
    if len(found) != len(call.operator.results):
        raise call.refuse("not a list of as many values as results")
    return found


def _one_hot(call: PirCall) -> Operand:
    x, classes = call.tensor(0), call.number(1)
    whole = classes if isinstance(classes, Ref) else as_dtype(classes, "int64")
    wide = x if x.type.dtype == "int64" else call.emit("to.dtype", x.ref, DtypeValue("int64"), kind=x.type)
    hot = call.emit("one_hot.default", wide.ref, whole, kind=PirTensor("int64", call.kind().shape))
    return call.emit("to.dtype", hot.ref, DtypeValue(call.kind().dtype))


def _meshgrid(call: PirCall) -> Operand:
    parts = call.tensors(0)
    refs = tuple(part.ref for part in parts)
    return call.builder.emit_several("aten.meshgrid.indexing", (refs,), call.kinds(), {"indexing": "ij"})


CREATION: dict[str, Rule] = {
    "pd_op.full": _full,
    "pd_op.full_int_array": _full_int_array,
    "pd_op.full_like": _full_like,
    "pd_op.full_with_tensor": _full_with_tensor,
    "pd_op.assign_value_": _assign_value,
    "pd_op.arange": _arange,
    "pd_op.eye": _eye,
    "pd_op.shape64": _shape,
    "pd_op.numel": _numel,
    "pd_op.assign": _same,
    "pd_op.tril": partial(_tril_triu, "tril"),
    "pd_op.triu": partial(_tril_triu, "triu"),
    "pd_op.one_hot": _one_hot,
    "pd_op.meshgrid": _meshgrid,
    "builtin.combine": _combine,
    "builtin.split": _split_list,
}
