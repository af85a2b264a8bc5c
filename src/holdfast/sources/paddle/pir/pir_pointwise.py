"""Rules of operators that compute each element by itself, and of those between two tensors that broadcast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from holdfast.format.dtypes import numpy_dtype
from holdfast.program.arguments import DtypeValue, Ref
from holdfast.sources.paddle.pir.pir_call import PirCall
from holdfast.sources.paddle.pir.pir_operands import (
    FLOATS,
    INTEGERS,
    Number,
    NumbersOperand,
    Operand,
    Shape,
    TensorOperand,
)

Rule = Callable[[PirCall], Operand | tuple[Operand, ...]]

# Of one tensor, without attributes: Paddle's name, aten's.
_UNARY = {
    "abs": "abs", "exp": "exp", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "square": "square", "reciprocal": "reciprocal", "sin": "sin", "cos": "cos",
    "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "asinh": "asinh",
    "acosh": "acosh", "atanh": "atanh", "tanh": "tanh", "sigmoid": "sigmoid", "logsigmoid": "log_sigmoid",
    "relu": "relu", "relu6": "relu6", "silu": "silu", "swish": "silu", "floor": "floor", "ceil": "ceil",
    "trunc": "trunc", "sign": "sgn", "erf": "erf", "erfinv": "erfinv", "lgamma": "lgamma", "digamma": "digamma",
    "hardswish": "hardswish", "bitwise_not": "bitwise_not",
}  # fmt: skip
_TO_BOOL = {"isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite", "logical_not": "logical_not"}
# Between two tensors of one dtype, with a result of the same one.
_BINARY = {
    "add": "add.Tensor", "subtract": "sub.Tensor", "multiply": "mul.Tensor", "maximum": "maximum.default",
    "minimum": "minimum.default", "fmax": "fmax.default", "fmin": "fmin.default", "remainder": "remainder.Tensor",
    "elementwise_pow": "pow.Tensor_Tensor", "bitwise_and": "bitwise_and.Tensor", "bitwise_or": "bitwise_or.Tensor",
    "bitwise_xor": "bitwise_xor.Tensor",
}  # fmt: skip
_FLOAT_BINARY = {"divide": "div.Tensor", "atan2": "atan2.default"}
_COMPARISONS = {
    "equal": "eq.Tensor", "not_equal": "ne.Tensor", "less_than": "lt.Tensor", "less_equal": "le.Tensor",
    "greater_than": "gt.Tensor", "greater_equal": "ge.Tensor",
}  # fmt: skip
_LOGICAL = {"logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "logical_xor"}
# Of sizes: the operation, and what it does with numbers.
_SIZES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("add", lambda a, b: a + b),
    "subtract": ("sub", lambda a, b: a - b),
    "multiply": ("mul", lambda a, b: a * b),
    "floor_divide": ("floordiv", lambda a, b: a // b),
    "remainder": ("mod", lambda a, b: a % b),
    "maximum": ("max", max),
    "minimum": ("min", min),
}


def broadcast(*operands: TensorOperand) -> Shape | None:
    """Return the sizes of what tensors broadcast to, where they are known by name."""
    rank = max(operand.rank for operand in operands)
    shape: list[object] = []
    for dim in range(-rank, 0):
        sizes = {operand.shape[dim] for operand in operands if -dim <= operand.rank} - {1}
        shape.append(1 if not sizes else sizes.pop() if len(sizes) == 1 else None)
    return tuple(shape)  # type: ignore[arg-type]


def _unary(name: str, call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    return call.emit(f"{name}.default", x.ref, hint=x.shape)


def _to_bool(name: str, call: PirCall) -> Operand:
    x = call.tensor(0)
    return call.emit(f"{name}.default", x.ref, hint=x.shape)


def _binary(name: str, call: PirCall) -> Operand:
    call.require("axis", -1)
    if call.operator.name.removeprefix("pd_op.") in _SIZES:
        sizes = _of_sizes(call)
        if sizes is not None:
            return sizes
    left, right = call.tensor(0), call.tensor(1)
    call.same_dtype(left, right)
    return call.emit(name, left.ref, right.ref, hint=broadcast(left, right))


def _of_sizes(call: PirCall) -> NumbersOperand | None:
    """Compute with two sizes, or lists of them; None for tensors of data."""
    left, right = call.operand(0), call.operand(1)
    if not isinstance(left, NumbersOperand) or not isinstance(right, NumbersOperand):
        return None
    kind = call.kind()
    count = max(len(left.values), len(right.values))
    whole = {left.type.dtype, right.type.dtype, kind.dtype} <= {"int32", "int64"}
    if not whole or any(len(side.values) not in (1, count) for side in (left, right)):
        return None
    name, compute = _SIZES[call.operator.name.removeprefix("pd_op.")]
    values: list[Number | Ref] = []
    for index in range(count):
        a, b = (side.values[index if len(side.values) > 1 else 0] for side in (left, right))
        if isinstance(a, Ref) or isinstance(b, Ref):
            values.append(call.builder.compute_size(name, a, b))
        elif type(a) is not int or type(b) is not int or (b == 0 and name in ("floordiv", "mod")):
            return None
        else:
            values.append(compute(a, b))
    return NumbersOperand(tuple(values), kind)


def _float_binary(name: str, call: PirCall) -> Operand:
    left, right = call.tensor(0), call.tensor(1)
    call.same_dtype(left, right)
    if left.type.dtype not in FLOATS:
        raise call.refuse(f"a division of {left.type.dtype}")
    return call.emit(name, left.ref, right.ref, hint=broadcast(left, right))


def _floor_divide(call: PirCall) -> Operand:
    sizes = _of_sizes(call)
    if sizes is not None:
        return sizes
    left, right = call.tensor(0), call.tensor(1)
    call.same_dtype(left, right)
    return call.emit("div.Tensor_mode", left.ref, right.ref, rounding_mode="floor", hint=broadcast(left, right))


def _comparison(name: str, call: PirCall) -> Operand:
    left, right = call.tensor(0), call.tensor(1)
    if left.type.dtype != right.type.dtype:
        raise call.refuse(f"a comparison of {left.type.dtype} with {right.type.dtype}")
    return call.emit(name, left.ref, right.ref, hint=broadcast(left, right))


def _logical(name: str, call: PirCall) -> Operand:
    left, right = call.tensor(0), call.tensor(1)
    return call.emit(f"{name}.default", left.ref, right.ref, hint=broadcast(left, right))


def as_dtype(value: Number, dtype: str) -> Number | None:
    """Return a number as Paddle converts it to a dtype; None if it cannot be said."""
    if dtype in INTEGERS:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return int(value) if whole and not isinstance(value, complex) else None
    if dtype == "bool":
        return bool(value)
    if dtype in FLOATS and not isinstance(value, complex):
        narrow = numpy_dtype(dtype).type if dtype in ("bfloat16", "float16", "float32") else float
        with np.errstate(over="ignore"):
            return float(narrow(value))
    return complex(value) if dtype.startswith("complex") else None


def _scale(call: PirCall) -> Operand:
    """Compute x * scale + bias, or (x + bias) * scale."""
    dtype = call.kind().dtype
    factor = call.number(1) if call.count > 1 else call.attribute("scale", float, 1.0)
    call.ignore("scale")
    bias: Number | Ref = call.attribute("bias", float, 0.0)
    last = call.attribute("bias_after_scale", bool, True)
    operand = call.operand(0)
    if isinstance(operand, NumbersOperand) and dtype in ("int32", "int64"):
        return _scaled_sizes(call, operand, factor, bias, last)
    x = call.tensor(0)
    call.same_dtype(x)
    terms = [None if isinstance(value, Ref) else as_dtype(value, dtype) for value in (factor, bias)]
    if None in terms:
        raise call.refuse(f"the factor {factor} or the summand {bias} for {dtype}")
    steps = [("mul.Scalar", terms[0], 1), ("add.Scalar", terms[1], 0)]
    for name, term, neutral in steps if last else reversed(steps):
        if term != neutral:
            x = call.emit(name, x.ref, term, hint=x.shape)
    return x


def _scaled_sizes(
    call: PirCall, operand: NumbersOperand, factor: Number | Ref, bias: Number | Ref, last: bool
) -> NumbersOperand:
    terms = [None if isinstance(value, Ref) else as_dtype(value, "int64") for value in (factor, bias)]
    if not last or None in terms:
        raise call.refuse("a size that is not scaled by an integer")
    values: list[Number | Ref] = []
    for value in operand.values:
        if not isinstance(value, Ref):
            values.append(int(value.real) * int((terms[0] or 0).real) + int((terms[1] or 0).real))
            continue
        product = value if terms[0] == 1 else call.builder.compute_size("mul", value, terms[0] or 0)
        values.append(product if terms[1] == 0 else call.builder.compute_size("add", product, terms[1] or 0))
    return NumbersOperand(tuple(values), call.kind())


def _cast(call: PirCall) -> Operand:
    operand = call.operand(0)
    kind = call.kind()
    call.ignore("dtype")
    whole = {"int32", "int64"}
    if isinstance(operand, NumbersOperand) and operand.type.dtype in whole and kind.dtype in whole:
        return NumbersOperand(operand.values, kind)
    x = call.tensor(0)
    return call.emit("to.dtype", x.ref, DtypeValue(kind.dtype), hint=x.shape)


def _clip(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    dtype = x.type.dtype
    bounds = []
    for index, name in ((1, "min"), (2, "max")):
        value = call.number(index) if call.count > 1 else call.attribute(name, float)
        if isinstance(value, float) and not np.isfinite(value) and dtype in INTEGERS:
            raise call.refuse(f"the bound {value} of {dtype}")
        bounds.append(value if isinstance(value, Ref) else as_dtype(value, dtype))
    if None in bounds:
        raise call.refuse(f"bounds that are not {dtype}")
    return call.emit("clamp.default", x.ref, *bounds, hint=x.shape)


def _pow(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    exponent = as_dtype(call.attribute("y", float), x.type.dtype)
    if exponent is None or (x.type.dtype in INTEGERS and exponent.real < 0):
        raise call.refuse(f"this exponent of {x.type.dtype}")
    return call.emit("pow.Tensor_Scalar", x.ref, exponent, hint=x.shape)


def _where(call: PirCall) -> Operand:
    condition, left, right = call.tensor(0), call.tensor(1), call.tensor(2)
    call.same_dtype(left, right)
    return call.emit("where.self", condition.ref, left.ref, right.ref, hint=broadcast(condition, left, right))


def _masked_fill(call: PirCall) -> Operand:
    x, mask, value = call.tensor(0), call.tensor(1), call.tensor(2)
    call.same_dtype(x, value)
    return call.emit("where.self", mask.ref, value.ref, x.ref, hint=broadcast(mask, value, x))


def _of_floats(name: str, attributes: tuple[str, ...], call: PirCall) -> Operand:
    """Translate an activation whose attributes are aten's arguments, in this order."""
    x = call.tensor(0)
    call.same_dtype(x)
    return call.emit(f"{name}.default", x.ref, *(call.attribute(key, float) for key in attributes), hint=x.shape)


def _gelu(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    approximate = "tanh" if call.attribute("approximate", bool, False) else "none"
    return call.emit("gelu.default", x.ref, approximate=approximate, hint=x.shape)


def _hardsigmoid(call: PirCall) -> Operand:
    """Compute clamp(slope * x + offset, 0, 1)."""
    x = call.tensor(0)
    call.same_dtype(x)
    slope, offset = call.attribute("slope", float), call.attribute("offset", float)
    product = call.emit("mul.Scalar", x.ref, slope, hint=x.shape)
    total = call.emit("add.Scalar", product.ref, offset, hint=x.shape)
    return call.emit("clamp.default", total.ref, 0, 1, hint=x.shape)


def _elu(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    return call.emit("elu.default", x.ref, call.attribute("alpha", float), hint=x.shape)


def _selu(call: PirCall) -> Operand:
    """Compute scale * (x if x > 0 else alpha * (exp(x) - 1))."""
    x = call.tensor(0)
    call.same_dtype(x)
    scale, alpha = call.attribute("scale", float), call.attribute("alpha", float)
    return call.emit("elu.default", x.ref, alpha, scale, hint=x.shape)


def _softplus(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    beta, threshold = call.attribute("beta", float), call.attribute("threshold", float)
    return call.emit("softplus.default", x.ref, beta, threshold, hint=x.shape)


def _softsign(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    size = call.emit("abs.default", x.ref, hint=x.shape)
    bottom = call.emit("add.Scalar", size.ref, 1, hint=x.shape)
    return call.emit("div.Tensor", x.ref, bottom.ref, hint=x.shape)


def _tanh_shrink(call: PirCall) -> Operand:
    x = call.tensor(0)
    call.same_dtype(x)
    inner = call.emit("tanh.default", x.ref, hint=x.shape)
    return call.emit("sub.Tensor", x.ref, inner.ref, hint=x.shape)


def _mish(call: PirCall) -> Operand:
    call.ignore("lambda")  # a threshold above which softplus is linear
    return _unary("mish", call)


def _swiglu(call: PirCall) -> Operand:
    """Compute silu(x) * y, where y is the second half of x if it is not given."""
    x, y = call.tensor(0), call.maybe_tensor(1)
    call.same_dtype(x)
    if y is None:
        hint = (*x.shape[:-1], None)
        x, y = call.several("chunk.default", (x.ref, 2, -1), (call.kind(), call.kind()), hint=hint)
    gate = call.emit("silu.default", x.ref, hint=x.shape)
    return call.emit("mul.Tensor", gate.ref, y.ref, hint=x.shape)


def _prelu(call: PirCall) -> Operand:
    x, slope = call.tensor(0), call.tensor(1)
    call.same_dtype(x, slope)
    call.require("data_format", "NCHW", "NCL", "NCDHW", "NC")
    call.require("mode", "all", "channel")
    if len(slope.type.shape) != 1:
        slope = call.emit("reshape.default", slope.ref, (-1,), kind=slope.type)
    return call.emit("prelu.default", x.ref, slope.ref, hint=x.shape)


def _table(names: dict[str, str], rule: Callable[[str, PirCall], Operand]) -> dict[str, Rule]:
    return {f"pd_op.{name}": partial(rule, counterpart) for name, counterpart in names.items()}


POINTWISE: dict[str, Rule] = {
    **_table(_UNARY, _unary),
    **_table(_TO_BOOL, _to_bool),
    **_table(_BINARY, _binary),
    **_table(_FLOAT_BINARY, _float_binary),
    **_table(_COMPARISONS, _comparison),
    **_table(_LOGICAL, _logical),
    "pd_op.floor_divide": _floor_divide,
    "pd_op.scale": _scale,
    "pd_op.cast": _cast,
    "pd_op.clip": _clip,
    "pd_op.pow": _pow,
    "pd_op.where": _where,
    "pd_op.masked_fill": _masked_fill,
    "pd_op.gelu": _gelu,
    "pd_op.hardsigmoid": _hardsigmoid,
    "pd_op.hardtanh": partial(_of_floats, "hardtanh", ("t_min", "t_max")),
    "pd_op.leaky_relu": partial(_of_floats, "leaky_relu", ("negative_slope",)),
    "pd_op.hardshrink": partial(_of_floats, "hardshrink", ("threshold",)),
    "pd_op.softshrink": partial(_of_floats, "softshrink", ("threshold",)),
    "pd_op.thresholded_relu": partial(_of_floats, "threshold", ("threshold", "value")),
    "pd_op.celu": partial(_of_floats, "celu", ("alpha",)),
    "pd_op.elu": _elu,
    "pd_op.selu": _selu,
    "pd_op.softplus": _softplus,
    "pd_op.softsign": _softsign,
    "pd_op.tanh_shrink": _tanh_shrink,
    "pd_op.mish": _mish,
    "pd_op.swiglu": _swiglu,
    "pd_op.prelu": _prelu,
}
