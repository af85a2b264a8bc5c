"""States of torchao's low-bit optimizers that one layout quantizes and another does not, converted with cast=True.

torchao keeps the state of a small shard plain. So the same state may be quantized on 2 ranks and plain on 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from holdfast.adapters.loading.wants import LoadRequests
from holdfast.adapters.low_bit_optimizers import is_low_bit
from holdfast.adapters.subclass_tensors import is_subclass
from holdfast.adapters.tensors import LikeShard, holder_of, part_view
from holdfast.adapters.weight_wrappers import local_tensor
from holdfast.layout.box import Box


class LowBitCasts:
    """Requests states of one optimizer that need a conversion; `actions` convert them once they are loaded."""

    def __init__(self, name: str, optimizer: Any, requests: LoadRequests) -> None:
        self._name = name
        self._optimizer = optimizer
        self._requests = requests
        self.actions: list[Callable[[], object]] = []

    def request(self, label: str, param: torch.Tensor, live: torch.Tensor) -> bool | None:
        """Request a state in the form in which it is stored; None if it needs no conversion, or allows none."""
        if not self._requests.casts or not is_low_bit(self._optimizer):
            return None
        stored = self._requests.subclasses(self._name).descriptions.get(label)
        if stored is not None and not is_subclass(live) and local_tensor(live).numel():
            return self._request_quantized(label, live, stored)
        source = self._requests.contents.find(self._name, label)
        if stored is None and source is not None and is_subclass(live):
            if source.shape != tuple(live.shape):
                return None
            plain = torch.empty_like(local_tensor(param.detach()), dtype=getattr(torch, source.logical))
            return self._request(label, LikeShard(param, plain), partial(_quantize, plain, live), source.logical)
        return None

    def _request_quantized(self, label: str, live: torch.Tensor, stored: Mapping[str, Any]) -> bool | None:
        """Request all of a quantized state in host memory: the live shard may begin within a block."""
        context, shape = stored.get("context") or {}, stored.get("shape")
        if stored.get("axes") or shape != list(live.shape) or context.get("block_size") != self._optimizer.block_size:
            return None
        like = torch.empty(shape, device="cpu")
        whole = self._optimizer._subclass_zeros(like, bool(context.get("signed")), context["block_size"])
        if type(whole).__name__ != stored.get("class"):
            return None
        return self._request(label, whole, partial(_dequantize, whole, live), type(whole).__name__)

    def _request(self, label: str, value: Any, action: Callable[[], object], kind: str) -> bool:
        if not self._requests.request(self._name, label, value):
            return False
        self._requests.findings.cast.append(f"{self._name}: {label}: {kind}, quantized on another layout")
        self.actions.append(action)
        return True


@torch.no_grad()
def _quantize(plain: torch.Tensor, live: torch.Tensor) -> None:
    local_tensor(live).copy_(plain)


@torch.no_grad()
def _dequantize(whole: Any, live: torch.Tensor) -> None:
    values, holder = whole.dequantize(), holder_of(live, "state")
    for part in holder.parts:
        part_view(holder, part).copy_(values[part.box.within(Box.full(tuple(values.shape)))])
