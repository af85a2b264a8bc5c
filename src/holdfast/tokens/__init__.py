"""Tokens of a model: `holdfast.tokens.add` adds them to live models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.tokens.add_tokens import AddedTokens, add

_HOMES = {
    "add": "add_tokens",
    "AddedTokens": "add_tokens",
}

__all__ = ["AddedTokens", "add"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.tokens' has no attribute {name!r}")
    return getattr(importlib.import_module(f"holdfast.tokens.{_HOMES[name]}"), name)
