"""Output formats, looked up by name. Each is a module whose `plan` is a Sink (see base.py)."""

from __future__ import annotations

import importlib
from typing import cast

from holdfast.convert.sinks.base import Sink
from holdfast.core.errors import InvalidArgument

FORMATS = {
    "holdfast": "safetensors with a manifest: the whole state; transformers can open the model",
    "hf": "a plain Hugging Face folder: the model's weights and its config and tokenizer files",
    "dcp": "a torch.distributed.checkpoint folder: model, optimizer and values, metadata as a pickle",
    "paddle": "Paddle's unified checkpoint: model, master weights and optimizer; PaddleFormers can resume from it",
}


def sink_named(name: str) -> Sink:
    """Return the sink of a format. Raises InvalidArgument for an unknown format."""
    if name not in FORMATS:
        raise InvalidArgument(f"unknown output format {name!r}; the formats are {', '.join(FORMATS)}")
    return cast(Sink, importlib.import_module(f"holdfast.convert.sinks.{name}").plan)
