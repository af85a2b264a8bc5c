"""Pauses of Python's garbage collector while a save or a load makes many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector: planning makes many objects, and each collection halts all threads.

    With tens of thousands of tensors the collections take as long as the plan.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
