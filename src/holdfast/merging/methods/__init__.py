"""The merge methods, by name."""

from __future__ import annotations

from holdfast.core.errors import InvalidArgument
from holdfast.merging.methods.averages import LinearMerge, PassthroughMerge
from holdfast.merging.methods.base import MergeMethod

__all__ = ["METHODS", "method_named"]

METHODS: dict[str, MergeMethod] = {method.name: method for method in (LinearMerge(), PassthroughMerge())}


def method_named(name: str) -> MergeMethod:
    """Return the method called `name`; raises InvalidArgument if there is no such method."""
    if name not in METHODS:
        raise InvalidArgument(f"unknown merge method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
