"""The merge methods, by name."""

from __future__ import annotations

from holdfast.core.errors import InvalidArgument
from holdfast.merging.methods.averages import LinearMerge, PassthroughMerge
from holdfast.merging.methods.base import MergeMethod
from holdfast.merging.methods.model_stock import ModelStockMerge
from holdfast.merging.methods.spherical import SlerpMerge
from holdfast.merging.methods.task_vectors import task_vector_methods

__all__ = ["METHODS", "method_named"]

_ALL: tuple[MergeMethod, ...] = (
    LinearMerge(),
    SlerpMerge(),
    *task_vector_methods(),
    ModelStockMerge(),
    PassthroughMerge(),
)
METHODS: dict[str, MergeMethod] = {method.name: method for method in _ALL}


def method_named(name: str) -> MergeMethod:
    """Return the method called `name`; raises InvalidArgument if there is no such method."""
    if name not in METHODS:
        raise InvalidArgument(f"unknown merge method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
