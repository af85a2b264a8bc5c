"""Every operation of the matrix, by family."""

from __future__ import annotations

import importlib
import pkgutil

from tests.spmd.table import Operation


def all_operations() -> dict[str, Operation]:
    """Every operation under its name, in the order of the families."""
    found: dict[str, Operation] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        for operation in importlib.import_module(f"{__name__}.{module.name}").TABLE.operations:
            assert operation.name not in found, f"two operations are called {operation.name}"
            found[operation.name] = operation
    return found
