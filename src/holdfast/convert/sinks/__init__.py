"""Formats that can be written, each a module whose `plan` is a Sink (see base.py)."""

from __future__ import annotations

import importlib
from typing import cast

from holdfast.convert.sinks.base import Sink
from holdfast.core.errors import InvalidArgument

FORMATS = {
    "holdfast": "safetensors with a manifest: model, optimizer, everything; opens in transformers too",
    "hf": "a plain Hugging Face folder: the model's weights and its config and tokenizer files",
    "dcp": "a torch.distributed.checkpoint folder: model, optimizer and values, metadata as a pickle",
    "paddle": "Paddle's unified checkpoint: model, master weights and optimizer, as PaddleFormers resumes from it",
}


def sink_named(name: str) -> Sink:
    """The sink of a format; raises InvalidArgument for one that cannot be written."""
    if name not in FORMATS:
        raise InvalidArgument(f"there is no format {name!r} to write; there are {', '.join(FORMATS)}")
    return cast(Sink, importlib.import_module(f"holdfast.convert.sinks.{name}").plan)
