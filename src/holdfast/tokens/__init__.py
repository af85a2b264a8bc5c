"""Tokens of a model: add them to live models, resize the vocabulary of a checkpoint, check a folder's tokens."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.tokens.add_tokens import AddedTokens, add
    from holdfast.tokens.check_folder import check
    from holdfast.tokens.resize_vocabulary import resize_vocab

_HOMES = {
    "add": "add_tokens",
    "AddedTokens": "add_tokens",
    "check": "check_folder",
    "resize_vocab": "resize_vocabulary",
}

__all__ = ["AddedTokens", "add", "check", "resize_vocab"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.tokens' has no attribute {name!r}")
    return getattr(importlib.import_module(f"holdfast.tokens.{_HOMES[name]}"), name)
