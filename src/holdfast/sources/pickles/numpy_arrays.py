"""numpy arrays, dtypes and scalars in pickles: the location of their bytes, never arrays of objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.format.dtypes import DType, dtype_named, is_dtype, numpy_dtype
from holdfast.sources.pickles.values import Encoded, FileSpan, Name, Names, Record, records

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_CODES = {
    "b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16", "i4": "int32", "u4": "uint32",
    "i8": "int64", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_SCALARS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

NUMPY: Names = {
    ("numpy", "ndarray"): None,
    **records("numpy", "dtype"),
    **{key: builder for module in _MODULES for key, builder in records(module, "_reconstruct", "scalar").items()},
    **{key: builder for module in _NUMERIC for key, builder in records(module, "_frombuffer").items()},
    **{("ml_dtypes", name): None for name in _ML_DTYPES},
    **{("numpy", name): None for name in (*_SCALARS, "bool_", "bool")},
}

Data = FileSpan | Encoded | bytes


@dataclass(frozen=True, slots=True)
class Array:
    """An array in a pickle. `data` is a span of the file, or bytes that the file does not store in raw form.

    With `fortran`, the bytes are those of the array with its dims reversed.
    """

    dtype: DType
    shape: tuple[int, ...]
    fortran: bool
    data: Data


def is_array(value: Any) -> bool:
    """Return True if a value is the record of a numpy array."""
    return isinstance(value, Record) and value.name.name in ("_reconstruct", "_frombuffer")


def is_scalar(value: Any) -> bool:
    """Return True if a value is the record of a numpy scalar."""
    return isinstance(value, Record) and value.name.name == "scalar" and value.name.module in _MODULES


def array_of(value: Record, where: str) -> Array:
    """Return the array of a record. Raises Unsupported for dtypes that are not plain numbers."""
    if value.name.name == "_frombuffer":
        if len(value.arguments) < 4:
            raise Damaged(f"{where}: an array without its bytes, dtype, shape or order")
        data, dtype, shape, order = value.arguments[:4]
        fortran = order == "F"
    else:
        if not isinstance(value.state, tuple) or len(value.state) < 5:
            raise Damaged(f"{where}: an array without its shape, dtype or bytes")
        _, shape, dtype, fortran, data = value.state[:5]
    sizes = _shape(shape, where)
    kind = dtype_of(dtype, where)
    data = data.encode("latin-1", "replace") if type(data) is str else data
    if not isinstance(data, FileSpan | Encoded | bytes):
        raise Unsupported(f"{where}: an array of Python objects; only arrays of numbers are supported")
    expected = math.prod(sizes) * kind.bytes * (2 if kind.pair else 1)
    found = _stored_bytes(data)
    if found is not None and found != expected:
        raise Damaged(f"{where}: an array of {kind.name}{list(sizes)} has {found} bytes, expected {expected}")
    return Array(kind, sizes, bool(fortran) and len(sizes) > 1, data)


def _stored_bytes(data: Data) -> int | None:
    if isinstance(data, FileSpan):
        return data.size
    return len(data) if isinstance(data, bytes) else None


def _shape(value: Any, where: str) -> tuple[int, ...]:
    """Return the sizes of an array, checked before use."""
    if type(value) is int:
        value = (value,)
    good = isinstance(value, tuple | list) and len(value) <= limits.TENSOR_RANK
    if not good or not all(type(size) is int and 0 <= size < 2**60 for size in value):
        raise Damaged(f"{where}: an array whose shape is not a list of sizes")
    if math.prod(max(1, size) for size in value) >= 2**58:
        raise Damaged(f"{where}: an array whose shape is too large")
    return tuple(value)


def dtype_of(value: Any, where: str) -> DType:
    """Return the dtype of a numpy dtype record. Raises Unsupported for big-endian dtypes."""
    if not isinstance(value, Record) or value.name != Name("numpy", "dtype") or not value.arguments:
        raise Damaged(f"{where}: an array whose dtype is not a numpy dtype")
    code = value.arguments[0]
    if isinstance(code, Name) and is_dtype(code.name):
        return dtype_named(code.name)
    if not isinstance(code, str):
        raise Unsupported(f"{where}: an array whose dtype has no plain name")
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "|"
    if order == ">" or code.startswith(">"):
        raise Unsupported(f"{where}: an array of big-endian numbers; store it in this machine's order")
    name = _CODES.get(code.lstrip("<|="))
    if name is None:
        raise Unsupported(f"{where}: an array of dtype {code[:40]!r}; only arrays of numbers are supported")
    return dtype_named(name)


def scalar_value(value: Record, where: str) -> Any:
    """Return the numpy scalar of a record."""
    import numpy as np

    if len(value.arguments) != 2:
        raise Damaged(f"{where}: a numpy scalar without its dtype or bytes")
    kind, data = dtype_of(value.arguments[0], where), value.arguments[1]
    raw = data.data if isinstance(data, FileSpan) else data.encode("latin-1", "replace") if type(data) is str else data
    if not isinstance(raw, bytes):
        raise Damaged(f"{where}: a numpy scalar without its bytes")
    dtype = np.dtype(np.complex128) if kind.pair else numpy_dtype(kind.name)
    if len(raw) != dtype.itemsize:
        raise Damaged(f"{where}: a numpy scalar of {len(raw)} bytes, expected {dtype.itemsize}")
    return np.frombuffer(raw, dtype=dtype)[0]
