"""Listening to collectives: the bytes that a rank receives, by the same measure for DTensor's and for those by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")


class Listener(TorchDispatchMode):
    """While it is entered: how many bytes this rank received, by collective."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()
        self._ranks = ranks

    @property
    def bytes(self) -> int:
        return sum(self.received.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            self.received[func._opname] += self._bytes(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, name: str, args: Any) -> int:
        others = self._ranks - 1
        if name in ("wait_tensor", "_wrap_tensor_autograd", "barrier"):
            return 0
        if name in ("all_reduce", "all_reduce_", "allreduce_"):
            return 2 * _size(args[0]) * others // self._ranks
        if name == "all_gather_into_tensor":
            return _size(args[0]) * others
        if name == "reduce_scatter_tensor":
            return _size(args[0]) * others // self._ranks
        if name == "alltoall_base_":
            return self._exchanged(args)
        raise AssertionError(f"the listener does not know {name}")

    def _exchanged(self, args: Any) -> int:
        out, splits = args[0], args[3]
        rows = list(splits) or [out.shape[0] // self._ranks] * self._ranks
        per_row = out.nbytes // max(1, out.shape[0])
        return (sum(rows) - rows[dist.get_rank()]) * per_row


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else sum(item.nbytes for item in value)
