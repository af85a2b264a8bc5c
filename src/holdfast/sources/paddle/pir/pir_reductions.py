"""Rules of operators along axes: sums, extremes, norms, softmax, sorts, cumulative sums, products of matrices."""

from __future__ import annotations

from functools import partial

from holdfast.program.arguments import DtypeValue, Ref, Value
from holdfast.sources.paddle.pir.pir_call import PirCall
from holdfast.sources.paddle.pir.pir_operands import FLOATS, Operand, Shape, TensorOperand
from holdfast.sources.paddle.pir.pir_pointwise import Rule, as_dtype, broadcast
from holdfast.sources.paddle.pir.pir_program import UNKNOWN, PirTensor

_BOTH = 2  # dims of a matrix


def _axes(call: PirCall, x: TensorOperand, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a reduction; none stand for all."""
    return tuple(call.axis(axis, x.rank) for axis in axes) or tuple(range(x.rank))


def _left(x: TensorOperand, axes: tuple[int, ...], keep: bool) -> Shape:
    """Return the sizes of a reduced tensor."""
    if keep:
        return tuple(1 if dim in axes else size for dim, size in enumerate(x.shape))
    return tuple(size for dim, size in enumerate(x.shape) if dim not in axes)


def _axis_input(call: PirCall, name: str = "axis") -> tuple[int, ...]:
    """Return the axes of a reduction, which are an input or an attribute."""
    if call.count > 1:
        return call.whole_numbers(1)
    value = call.operator.attributes.get(name)
    return (call.attribute(name, int),) if isinstance(value, int) else call.integers(name, ())


def _sum(call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call), call.attribute("keepdim", bool, False)
    call.ignore("dtype")
    places = _axes(call, x, axes)
    dtype = DtypeValue(call.kind().dtype)
    return call.emit("sum.dim_IntList", x.ref, places, keep, dtype=dtype, hint=_left(x, places, keep))


def _mean(call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call), call.attribute("keepdim", bool, False)
    call.same_dtype(x)
    if x.type.dtype not in FLOATS:
        raise call.refuse(f"a mean of {x.type.dtype}")
    places = _axes(call, x, axes)
    return call.emit("mean.dim", x.ref, places, keep, hint=_left(x, places, keep))


def _extreme(name: str, call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call), call.attribute("keepdim", bool, False)
    call.same_dtype(x)
    places = _axes(call, x, axes)
    return call.emit(f"{name}.default", x.ref, places, keep, hint=_left(x, places, keep))


def _prod(call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call, "dims"), call.attribute("keepdim", bool, False)
    call.same_dtype(x)
    everything = call.attribute("reduce_all", bool, False)
    places = _axes(call, x, () if everything else axes)
    hint = _left(x, places, keep)
    ref = x.ref
    for index, place in enumerate(sorted(places, reverse=True)):
        rank = x.rank if keep else x.rank - index - 1
        ref = call.emit("prod.dim_int", ref, place, keep, kind=PirTensor(x.type.dtype, (UNKNOWN,) * rank)).ref
    return TensorOperand(ref, call.kind(), hint)


def _any_all(name: str, call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call), call.attribute("keepdim", bool, False)
    places = _axes(call, x, axes)
    return call.emit(f"{name}.dims", x.ref, places, keep, hint=_left(x, places, keep))


def _logsumexp(call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call), call.attribute("keepdim", bool, False)
    call.same_dtype(x)
    places = _axes(call, x, () if call.attribute("reduce_all", bool, False) else axes)
    return call.emit("logsumexp.default", x.ref, places, keep, hint=_left(x, places, keep))


def _arg(name: str, call: PirCall) -> Operand:
    x, axis, keep = call.tensor(0), call.number(1), call.attribute("keepdims", bool, False)
    call.ignore("dtype")
    kind = call.kind()
    whole = None if isinstance(axis, Ref) else as_dtype(axis, "int64")
    if type(whole) is not int:
        raise call.refuse("an axis that depends on sizes")
    flat = call.attribute("flatten", bool, False)
    place = None if flat else call.axis(whole, x.rank)
    if flat and keep:
        raise call.refuse("keepdims of a flattened tensor")
    hint = () if place is None else _left(x, (place,), keep)
    wide = PirTensor("int64", kind.shape)
    found = call.emit(f"{name}.default", x.ref, place, keep, kind=wide, hint=hint)
    return found if kind.dtype == "int64" else call.emit("to.dtype", found.ref, DtypeValue(kind.dtype), hint=hint)


def _argsort(call: PirCall) -> tuple[Operand, ...]:
    """Sort stably: the order of equal elements is Paddle's only if it is asked for."""
    x, axis = call.tensor(0), call.attribute("axis", int)
    call.ignore("stable")
    descending = call.attribute("descending", bool, False)
    kinds = (call.kind(0), call.kind(1))
    options: dict[str, Value] = {"stable": True, "dim": call.axis(axis, x.rank), "descending": descending}
    return call.several("sort.stable", (x.ref,), kinds, options, hint=x.shape)


def _topk(call: PirCall) -> tuple[Operand, ...]:
    x, count, axis = call.tensor(0), call.number(1), call.attribute("axis", int, -1)
    whole = count if isinstance(count, Ref) else as_dtype(count, "int64")
    if not call.attribute("sorted", bool, True):
        raise call.refuse("an unsorted result")
    largest = call.attribute("largest", bool, True)
    kinds = (call.kind(0), call.kind(1))
    place = call.axis(axis, x.rank)
    hint = tuple(None if dim == place else size for dim, size in enumerate(x.shape))
    return call.several("topk.default", (x.ref, whole, place, largest, True), kinds, hint=hint)


def _p_norm(call: PirCall) -> Operand:
    x, order, keep = call.tensor(0), call.attribute("porder", float), call.attribute("keepdim", bool, False)
    call.same_dtype(x)
    axis = call.attribute("axis", int)
    call.ignore("epsilon")  # of the gradient
    flat = call.attribute("asvector", bool, False)
    if flat and keep:
        raise call.refuse("keepdim of a flattened tensor")
    places = tuple(range(x.rank)) if flat else (call.axis(axis, x.rank),)
    return call.emit("linalg_vector_norm.default", x.ref, order, places, keep, hint=_left(x, places, keep))


def _frobenius_norm(call: PirCall) -> Operand:
    x, axes, keep = call.tensor(0), _axis_input(call), call.attribute("keep_dim", bool, False)
    call.same_dtype(x)
    places = _axes(call, x, () if call.attribute("reduce_all", bool, False) else axes)
    return call.emit("linalg_vector_norm.default", x.ref, 2, places, keep, hint=_left(x, places, keep))


def _softmax(name: str, call: PirCall) -> Operand:
    x, axis = call.tensor(0), call.attribute("axis", int, -1)
    call.same_dtype(x)
    return call.emit(f"{name}.int", x.ref, call.axis(axis, x.rank), hint=x.shape)


def _cumsum(call: PirCall) -> Operand:
    x, axis = call.tensor(0), call.number(1)
    call.require("exclusive", False)
    call.require("reverse", False)
    call.ignore("dtype")
    whole = None if isinstance(axis, Ref) else as_dtype(axis, "int64")
    if type(whole) is not int:
        raise call.refuse("an axis that depends on sizes")
    dtype = DtypeValue(call.kind().dtype)
    if call.attribute("flatten", bool, False):
        flat = call.emit("reshape.default", x.ref, (-1,), kind=PirTensor(x.type.dtype, (UNKNOWN,)))
        return call.emit("cumsum.default", flat.ref, 0, dtype=dtype)
    return call.emit("cumsum.default", x.ref, call.axis(whole, x.rank), dtype=dtype, hint=x.shape)


def _cumprod(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    call.require("exclusive", False)
    call.require("reverse", False)
    return call.emit("cumprod.default", x.ref, call.axis(call.attribute("dim", int), x.rank), hint=x.shape)


def _matmul(call: PirCall) -> Operand:
    """Multiply matrices; the flags transpose the last two dims of tensors that have them."""
    left, right = call.tensor(0), call.tensor(1)
    call.same_dtype(left, right)
    left, right = _transposed(call, left, "transpose_x"), _transposed(call, right, "transpose_y")
    hint = None
    if left.rank >= _BOTH and right.rank >= _BOTH:
        wider = left if left.rank >= right.rank else right
        batch = wider.shape[:-2] if left.rank != right.rank or left.shape[:-2] == right.shape[:-2] else None
        if batch is None:
            fronts = (_front(left), _front(right))
            batch = broadcast(*fronts)
        hint = None if batch is None else (*batch, left.shape[-2], right.shape[-1])
    return call.emit("matmul.default", left.ref, right.ref, hint=hint)


def _transposed(call: PirCall, side: TensorOperand, flag: str) -> TensorOperand:
    if not call.attribute(flag, bool, False) or side.rank < _BOTH:
        return side
    shape, sizes = (*side.shape[:-2], side.shape[-1], side.shape[-2]), side.type.shape
    kind = PirTensor(side.type.dtype, (*sizes[:-2], sizes[-1], sizes[-2]))
    return call.emit("transpose.int", side.ref, -1, -2, kind=kind, hint=shape)


def _front(x: TensorOperand) -> TensorOperand:
    return TensorOperand(x.ref, PirTensor(x.type.dtype, x.type.shape[:-2]), x.shape[:-2])


def _bmm(call: PirCall) -> Operand:
    left, right = call.tensor(0), call.tensor(1)
    call.same_dtype(left, right)
    return call.emit("bmm.default", left.ref, right.ref, hint=(left.shape[0], left.shape[1], right.shape[2]))


def _addmm(call: PirCall) -> Operand:
    """Compute beta * x + alpha * (y @ z)."""
    x, y, z = call.tensor(0), call.tensor(1), call.tensor(2)
    call.same_dtype(x, y, z)
    beta, alpha = call.attribute("beta", float, 1.0), call.attribute("alpha", float, 1.0)
    return call.emit("addmm.default", x.ref, y.ref, z.ref, beta=beta, alpha=alpha, hint=(y.shape[0], z.shape[1]))


def _two(name: str, call: PirCall) -> Operand:
    left, right = call.tensor(0), call.tensor(1)
    call.same_dtype(left, right)
    return call.emit(f"{name}.default", left.ref, right.ref)


def _einsum(call: PirCall) -> Operand:
    parts = call.tensors(0)
    call.same_dtype(*parts)
    equation = call.attribute("equation", str)
    if not set(equation) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,->. "):
        raise call.refuse(f"the equation {equation[:80]!r}")
    return call.emit("einsum.default", equation, tuple(part.ref for part in parts))


REDUCTIONS: dict[str, Rule] = {
    "pd_op.sum": _sum,
    "pd_op.mean": _mean,
    "pd_op.max": partial(_extreme, "amax"),
    "pd_op.amax": partial(_extreme, "amax"),
    "pd_op.min": partial(_extreme, "amin"),
    "pd_op.amin": partial(_extreme, "amin"),
    "pd_op.prod": _prod,
    "pd_op.any": partial(_any_all, "any"),
    "pd_op.all": partial(_any_all, "all"),
    "pd_op.logsumexp": _logsumexp,
    "pd_op.argmax": partial(_arg, "argmax"),
    "pd_op.argmin": partial(_arg, "argmin"),
    "pd_op.argsort": _argsort,
    "pd_op.topk": _topk,
    "pd_op.p_norm": _p_norm,
    "pd_op.frobenius_norm": _frobenius_norm,
    "pd_op.softmax": partial(_softmax, "softmax"),
    "pd_op.log_softmax": partial(_softmax, "log_softmax"),
    "pd_op.cumsum": _cumsum,
    "pd_op.cumprod": _cumprod,
    "pd_op.matmul": _matmul,
    "pd_op.bmm": _bmm,
    "pd_op.addmm": _addmm,
    "pd_op.dot": partial(_two, "dot"),
    "pd_op.mv": partial(_two, "mv"),
    "pd_op.kron": partial(_two, "kron"),
    "pd_op.einsum": _einsum,
}
