"""Holdfast keeps the state of distributed training runs.

`import holdfast` does not import torch; the names below load what they need when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import (
    Damaged,
    HoldfastError,
    InvalidArgument,
    LayoutError,
    Mismatch,
    NotFound,
    PeerFailed,
    Skipped,
    StorageError,
    TimedOut,
    Unsupported,
    Untrusted,
)
from holdfast.core.torch_needed import torch_missing
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast import keep, tokens, when
    from holdfast.adapters.program.export_program import export_program
    from holdfast.adapters.tensors import FlatShard
    from holdfast.api import load, save
    from holdfast.api import open_checkpoint as open
    from holdfast.checkpoint.checkpoint import Checkpoint
    from holdfast.checkpointer import Checkpointer
    from holdfast.core.events import Event
    from holdfast.core.warnings import HoldfastWarning
    from holdfast.data.batches import Batches
    from holdfast.ema import EMA
    from holdfast.engine.load_report import LoadReport
    from holdfast.engine.peek import Peek
    from holdfast.engine.program_add import add_program
    from holdfast.engine.program_load import load_program
    from holdfast.engine.save_handle import SaveHandle
    from holdfast.mapping.program import Mapping
    from holdfast.merging.lora.merge_lora_call import merge_lora
    from holdfast.merging.merge_call import merge
    from holdfast.program.model_program import Program
    from holdfast.random_streams import RandomStreams
    from holdfast.sizes.memory_plan import MemoryPlan, plan_memory

_HOMES = {
    "save": ("holdfast.api", "save"),
    "load": ("holdfast.api", "load"),
    "open": ("holdfast.api", "open_checkpoint"),
    "merge": ("holdfast.merging.merge_call", "merge"),
    "merge_lora": ("holdfast.merging.lora.merge_lora_call", "merge_lora"),
    "add_program": ("holdfast.engine.program_add", "add_program"),
    "export_program": ("holdfast.adapters.program.export_program", "export_program"),
    "load_program": ("holdfast.engine.program_load", "load_program"),
    "Program": ("holdfast.program.model_program", "Program"),
    "Checkpoint": ("holdfast.checkpoint.checkpoint", "Checkpoint"),
    "Checkpointer": ("holdfast.checkpointer", "Checkpointer"),
    "SaveHandle": ("holdfast.engine.save_handle", "SaveHandle"),
    "LoadReport": ("holdfast.engine.load_report", "LoadReport"),
    "Peek": ("holdfast.engine.peek", "Peek"),
    "MemoryPlan": ("holdfast.sizes.memory_plan", "MemoryPlan"),
    "plan_memory": ("holdfast.sizes.memory_plan", "plan_memory"),
    "Mapping": ("holdfast.mapping.program", "Mapping"),
    "EMA": ("holdfast.ema", "EMA"),
    "Batches": ("holdfast.data.batches", "Batches"),
    "RandomStreams": ("holdfast.random_streams", "RandomStreams"),
    "Event": ("holdfast.core.events", "Event"),
    "FlatShard": ("holdfast.adapters.tensors", "FlatShard"),
    "HoldfastWarning": ("holdfast.core.warnings", "HoldfastWarning"),
}

_MODULES = ("keep", "tokens", "when")

__all__ = [
    "EMA",
    "Batches",
    "Checkpoint",
    "Checkpointer",
    "Damaged",
    "Event",
    "FlatShard",
    "HoldfastError",
    "HoldfastWarning",
    "InvalidArgument",
    "LayoutError",
    "LoadReport",
    "Mapping",
    "MemoryPlan",
    "Mismatch",
    "NotFound",
    "Peek",
    "PeerFailed",
    "Program",
    "RandomStreams",
    "SaveHandle",
    "Skipped",
    "StorageError",
    "TimedOut",
    "Unsupported",
    "Untrusted",
    "__version__",
    "add_program",
    "export_program",
    "keep",
    "load",
    "load_program",
    "merge",
    "merge_lora",
    "open",
    "plan_memory",
    "save",
    "tokens",
    "when",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"holdfast.{name}")
    module, attribute = _HOMES[name]
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise Unsupported(torch_missing(f"holdfast.{name}")) from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
