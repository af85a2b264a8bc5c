"""Tokens of a model: `add` to live models, `resize_vocab` of a checkpoint, `check` of a folder."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.tokens.add_tokens import AddedTokens, add
    from holdfast.tokens.check_folder import TokenCheck, check
    from holdfast.tokens.resize_vocabulary import ResizeOptions, resize_vocab

_HOMES = {
    "add": "add_tokens",
    "AddedTokens": "add_tokens",
    "ResizeOptions": "resize_vocabulary",
    "TokenCheck": "check_folder",
    "check": "check_folder",
    "resize_vocab": "resize_vocabulary",
}

__all__ = ["AddedTokens", "ResizeOptions", "TokenCheck", "add", "check", "resize_vocab"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.tokens' has no attribute {name!r}")
    return getattr(importlib.import_module(f"holdfast.tokens.{_HOMES[name]}"), name)
