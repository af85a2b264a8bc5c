"""Every thread's cache of sharding decisions.

torch keeps one cache per thread and clears the calling thread's only. Autograd runs backward on threads of its own on
a GPU, so decisions made there before `enable()` would stay. Each thread's state holds a capsule that empties its cache
when the capsule goes: removing it clears the cache from here.
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
    """Empty the cache of each thread of this process; return False where this Python offers no way to."""
    if not hasattr(ctypes.pythonapi, DICT):
        return False
    for state in list(_thread_states()):
        state.pop(CAPSULE, None)
    return True


def _thread_states() -> Iterator[dict[str, Any]]:
    """Each thread's own dict, in which extensions keep what belongs to one thread."""
    thread = _call(FIRST, _call(INTERPRETER))
    while thread:
        address = _call(DICT, thread)
        if address:
            yield ctypes.cast(address, ctypes.py_object).value
        thread = _call(NEXT, thread)


def _call(name: str, *pointers: int | None) -> int | None:
    """A function of Python's C API that takes and returns pointers."""
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * len(pointers)
    return function(*pointers)  # type: ignore[no-any-return]
