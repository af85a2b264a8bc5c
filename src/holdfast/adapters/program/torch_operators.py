"""Names of torch in programs: dtypes, layouts, memory formats, aten overloads; and what of torch is private.

An operator is looked up only if it is in the shipped table, and only below `torch.ops.aten`.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.errors import Unsupported
from holdfast.program.arguments import (
    FORMATS,
    LAYOUTS,
    DeviceValue,
    DtypeValue,
    FormatValue,
    LayoutValue,
    SliceValue,
    Value,
)
from holdfast.program.operator_table import allowed_overloads

_LAYOUT = {name: getattr(torch, name) for name in LAYOUTS}
_FORMAT = {name: getattr(torch, name) for name in FORMATS}
_FORMAT_NAMES = {value: name for name, value in _FORMAT.items()}


def overload_named(op: str) -> Any:
    """Return the overload of a name such as "aten.linear.default"; raises Unsupported outside of the table."""
    if op not in allowed_overloads():
        raise Unsupported(f"{op[:120]!r} is not an operator that a program may call")
    _, packet, overload = op.split(".")
    try:
        return getattr(getattr(torch.ops.aten, packet), overload)
    except AttributeError:
        raise Unsupported(
            f"torch {torch.__version__} has no operator {op}; the program was written for another"
        ) from None


def schema_of(overload: Any) -> Any:
    """Return the schema of an overload; `str` of it is torch's text."""
    return overload._schema


def is_backward_compatible(new: Any, old_text: str) -> bool:
    """Return True if calls that were written for an older schema mean the same with the new one, as torch judges."""
    try:
        old = torch._C.parse_schema(old_text)
    except (RuntimeError, ValueError, IndexError, OverflowError):
        return False
    return bool(new.is_backward_compatible_with(old))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def from_torch(value: Any, model_device: str | None) -> Value:
    """Return a constant of a graph as a value; raises TypeError for what a program cannot say.

    The device of the model becomes "model", so that a program runs wherever its weights are.
    """
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, torch.dtype):
        return DtypeValue(dtype_name(value))
    if isinstance(value, torch.device):
        return DeviceValue("model" if value.type == model_device else value.type)
    if isinstance(value, torch.layout) and value is torch.strided:
        return LayoutValue("strided")
    if isinstance(value, torch.memory_format) and value in _FORMAT_NAMES:
        return FormatValue(_FORMAT_NAMES[value])
    if isinstance(value, slice):
        return SliceValue(*(from_torch(part, model_device) for part in (value.start, value.stop, value.step)))
    raise TypeError(f"{type(value).__name__} {str(value)[:80]!r}")


def to_torch(value: Value, device: torch.device) -> Any:
    """Return a constant of a program as torch takes it; references and lists are the caller's."""
    if isinstance(value, DtypeValue):
        return getattr(torch, value.name)
    if isinstance(value, DeviceValue):
        return device if value.kind == "model" else torch.device(value.kind)
    if isinstance(value, LayoutValue):
        return _LAYOUT[value.name]
    if isinstance(value, FormatValue):
        return _FORMAT[value.name]
    if isinstance(value, SliceValue):
        return slice(value.start, value.stop, value.step)
    return value
