"""Replicate plain tensors created in a model's `forward` when a call combines them with DTensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from holdfast.spmd.autoplan.nested_tensors import map_tensors, tensors_in


class ReplicatePlainTensors(TorchFunctionMode):
    """While active, a plain tensor that meets a DTensor in a call becomes a replica.

    Masks, positions and initial states of recurrent layers are made in `forward`, where nobody can place them.
    """

    def __init__(self, replica: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._replica = replica

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if any(_is_plain(tensor) for tensor in tensors) and any(isinstance(tensor, DTensor) for tensor in tensors):
            args, kwargs = map_tensors((tuple(args), kwargs), lambda t: self._replica(t) if _is_plain(t) else t)
        return func(*args, **kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor)


class ActiveModules(threading.local):
    """The modules that are running on this thread, outermost first; the mode is on while there are any."""

    def __init__(self) -> None:
        self.modules: list[object] = []
        self.mode: ReplicatePlainTensors | None = None

    def enter(self, module: object, replica: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.modules and not torch.compiler.is_compiling():
            self.mode = ReplicatePlainTensors(replica)
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        self.modules.append(module)

    def leave(self, module: object) -> None:
        """Remove a module that returned or raised, and any nested modules whose exit was not reported."""
        while module in self.modules and self.modules.pop() is not module:
            pass
        if not self.modules and self.mode is not None:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.mode = None
