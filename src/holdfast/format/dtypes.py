"""Dtypes: Holdfast's name, safetensors code, number of bits, stored form of complex and packed dtypes, numpy dtype.

A dtype without a safetensors code is stored as another dtype (`stored`), and the manifest
records the logical name: complex numbers become pairs of reals, packed 4-bit becomes raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from holdfast.core.errors import Unsupported

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. `code` is its code in headers; `pair` adds a last dim of 2."""

    name: str
    code: str
    bits: int
    stored: str
    pair: bool = False

    @property
    def bytes(self) -> int:
        return self.bits // 8


def _plain(name: str, code: str, bits: int) -> DType:
    return DType(name, code, bits, name)


_ALL = (
    _plain("bool", "BOOL", 8),
    _plain("uint8", "U8", 8),
    _plain("int8", "I8", 8),
    _plain("uint16", "U16", 16),
    _plain("int16", "I16", 16),
    _plain("uint32", "U32", 32),
    _plain("int32", "I32", 32),
    _plain("uint64", "U64", 64),
    _plain("int64", "I64", 64),
    _plain("float8_e4m3fn", "F8_E4M3", 8),
    _plain("float8_e4m3fnuz", "F8_E4M3FNUZ", 8),
    _plain("float8_e5m2", "F8_E5M2", 8),
    _plain("float8_e5m2fnuz", "F8_E5M2FNUZ", 8),
    _plain("float8_e8m0fnu", "F8_E8M0", 8),
    _plain("float16", "F16", 16),
    _plain("bfloat16", "BF16", 16),
    _plain("float32", "F32", 32),
    _plain("float64", "F64", 64),
    _plain("complex64", "C64", 64),
    DType("complex32", "F16", 16, "float16", pair=True),
    DType("complex128", "F64", 64, "float64", pair=True),
    DType("float4_e2m1fn_x2", "U8", 8, "uint8"),
)
_BY_NAME = {dtype.name: dtype for dtype in _ALL}
_BY_CODE = {dtype.code: dtype for dtype in _ALL if dtype.stored == dtype.name}
_ML_DTYPES = frozenset(name for name in _BY_NAME if name.startswith(("float8", "bfloat16")))


def dtype_named(name: str) -> DType:
    """Return the dtype called `name`; raises Unsupported if the format does not have it."""
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(sorted(_BY_NAME))
        raise Unsupported(f"dtype {name!r} cannot be stored; the format has {known}") from None


def model_dtype_named(name: str | None) -> DType | None:
    """Return the dtype that a stored model is rounded to; raises Unsupported unless it is a 16-bit float."""
    if name is None:
        return None
    dtype = dtype_named(str(name).removeprefix("torch."))
    if dtype.name not in ("bfloat16", "float16"):
        raise Unsupported(f"model_dtype={name!r}: choose 'bfloat16' or 'float16', or leave it out")
    return dtype


def is_dtype(name: str) -> bool:
    return name in _BY_NAME


def dtype_from_code(code: str) -> DType | None:
    """Return the dtype with this safetensors code, or None."""
    return _BY_CODE.get(code)


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype for a dtype name, from ml_dtypes if numpy has none."""
    import numpy as np

    dtype = dtype_named(name)
    if dtype.pair or dtype.name != dtype.stored:
        dtype = _BY_NAME[dtype.stored]
    if dtype.name in _ML_DTYPES:
        import ml_dtypes

        return cast("np.dtype[np.generic]", np.dtype(getattr(ml_dtypes, dtype.name)))
    return cast("np.dtype[np.generic]", np.dtype(dtype.name))
