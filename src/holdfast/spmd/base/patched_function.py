"""`PatchedFunction`: a function of torch that is replaced, and restored.

Code without DTensors must not notice. A replacement therefore has the globals of torch's function and names it as
`__wrapped__`, so that TorchScript compiles torch's own source.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.jit import _builtins


class PatchedFunction:
    """A replaced function: its owner (a module or class), its name, torch's function and the replacement."""

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self.original = getattr(owner, name)
        self._target = [make(self.original)]
        self._function = _disguised(self.original, self._target)
        if isinstance(owner, types.ModuleType):  # a builtin names another module, where pickle would not find it
            self._function.__module__, self._function.__qualname__ = owner.__name__, name
        setattr(owner, name, self._function)

    def remove(self) -> None:
        """Restore torch's function; if another library wrapped the replacement, the replacement only forwards calls."""
        self._target[0] = self.original
        _builtins._get_builtin_table().pop(id(self._function), None)  # type: ignore[no-untyped-call]
        if getattr(self._owner, self._name) is self._function:
            setattr(self._owner, self._name, self.original)


def _disguised(original: Any, target: list[Callable[..., Any]]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return target[0](*args, **kwargs)

    globals_ = getattr(original, "__globals__", globals())
    # A code object of its own: Dynamo counts recompilations by code, and would add up those of all replacements.
    code = call.__code__.replace(co_name=original.__name__, co_qualname=original.__name__)
    made = types.FunctionType(code, globals_, original.__name__, None, call.__closure__)
    functools.update_wrapper(made, original)
    builtin = _builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if builtin is not None:  # TorchScript knows the function by name, not by its source
        _builtins._register_builtin(made, builtin)
    return made
