"""Functions of torch that are replaced, and put back.

Code that uses no DTensor must not notice. A stand-in therefore looks like torch's function to whoever reads its source:
it has torch's globals and names torch's function as the one that it wraps, so that TorchScript compiles torch's own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.jit import _builtins


class StandIn:
    """One replaced function: a name of a module or class, torch's function, and ours in its place."""

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self.torch_way = getattr(owner, name)
        self._chosen = [make(self.torch_way)]
        self._function = _as_torchs_own(self.torch_way, self._chosen)
        setattr(owner, name, self._function)

    def remove(self) -> None:
        """Put torch's function back; where another library has wrapped ours, ours only passes on what it is given."""
        self._chosen[0] = self.torch_way
        _builtins._get_builtin_table().pop(id(self._function), None)  # type: ignore[no-untyped-call]
        if getattr(self._owner, self._name) is self._function:
            setattr(self._owner, self._name, self.torch_way)


def _as_torchs_own(torch_way: Any, chosen: list[Callable[..., Any]]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return chosen[0](*args, **kwargs)

    globals_ = getattr(torch_way, "__globals__", globals())
    made = types.FunctionType(call.__code__, globals_, torch_way.__name__, None, call.__closure__)
    functools.update_wrapper(made, torch_way)
    builtin = _builtins._find_builtin(torch_way)  # type: ignore[no-untyped-call]
    if builtin is not None:  # TorchScript knows it by name, not by its source
        _builtins._register_builtin(made, builtin)
    return made
