"""The description of a tensor subclass as JSON: compared between a checkpoint and the live tensor, never executed.

Class names are texts for comparison and messages. A load takes every class from the live tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from holdfast.core import limits
from holdfast.core.errors import Unsupported

_DEPTH = limits.JSON_DEPTH // 4


def describe_context(value: Any, where: str, depth: int = 0) -> Any:
    """Return what `__tensor_flatten__` says beside the tensors as JSON, without devices; raises Unsupported."""
    if depth > _DEPTH:
        raise Unsupported(f"{where}: the context of the tensor subclass is nested deeper than {_DEPTH}")

    def inner(item: Any) -> Any:
        return describe_context(item, where, depth + 1)

    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, torch.device):
        return "device"  # a load keeps the live one
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: inner(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {type(value).__name__: {name: inner(getattr(value, name)) for name in value._fields}}
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: inner(item) for key, item in value.items()}
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    kind = type(value)
    raise Unsupported(
        f"{where}: the context of the tensor subclass holds a {kind.__module__}.{kind.__qualname__}, which has no "
        "description to compare at a load"
    )


def differences(stored: Any, live: Any, path: str = "") -> Iterator[str]:
    """Yield the fields in which two descriptions differ, with both values."""
    if isinstance(stored, Mapping) and isinstance(live, Mapping):
        for name in dict.fromkeys((*stored, *live)):
            yield from differences(stored.get(name), live.get(name), f"{path}.{name}" if path else str(name))
    elif stored != live:
        yield f"{path or 'context'}: stored {_short(stored)}, live {_short(live)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
