"""Clear DTensor's cache of sharding decisions in every thread of the process.

torch keeps one cache per thread and clears only the calling thread's. Autograd runs backward on its own threads on a
GPU, so decisions made there before `enable()` would stay. Each thread's state holds a capsule that empties the thread's
cache when it is destroyed: removing the capsule clears the cache from here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

CAPSULE = "__DTensor_fastpath_thread_cache_cleanup"
INTERPRETER, FIRST, NEXT, DICT = (
    "PyInterpreterState_Get",
    "PyInterpreterState_ThreadHead",
    "PyThreadState_Next",
    "_PyThreadState_GetDict",  # not exported by every Python
)


def clear_every_thread() -> bool:
    """Empty the cache of each thread of this process; return False if this Python cannot."""
    if not hasattr(ctypes.pythonapi, DICT):
        return False
    for state in list(_thread_states()):
        state.pop(CAPSULE, None)
    return True


def _thread_states() -> Iterator[dict[str, Any]]:
    """Yield each thread's state dict, in which extensions keep thread-local data."""
    thread = _call(FIRST, _call(INTERPRETER))
    while thread:
        address = _call(DICT, thread)
        if address:
            yield ctypes.cast(address, ctypes.py_object).value
        thread = _call(NEXT, thread)


def _call(name: str, *pointers: int | None) -> int | None:
    """Call a function of Python's C API that takes and returns pointers."""
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * len(pointers)
    return function(*pointers)  # type: ignore[no-any-return]
