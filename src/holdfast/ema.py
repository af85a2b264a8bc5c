"""`EMA`, the moving average of a model's weights: update on the device or a host thread, swap, save, resume."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from holdfast.adapters.module import view_module
from holdfast.adapters.subclass_tensors import is_subclass
from holdfast.adapters.tensors import LikeShard
from holdfast.adapters.weight_wrappers import local_tensor
from holdfast.capture.capturer import wait_for_captures
from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported

_SLICE_BYTES = 256 << 20
_SPARE_BYTES = 1 << 30


class EMA:
    """The average of a model's parameters over its updates, in fp32, and the newest buffers.

    Call `update()` after every optimizer step; every `every`-th call is an update. After n updates the
    average covers the last n states, weighted by `decay` to the power of their age; the initial weights
    do not contribute. Add it to the state: it is saved as `ema/model-*` with its own config, so that
    `from_pretrained(..., subfolder="ema")` opens it, and it resumes bit for bit on any layout. Use
    `with ema.swap():` to evaluate with the average.

    With `device="cpu"` the average is kept in host memory and computed on a thread, from a copy of the
    weights taken at the update. Raises InvalidArgument for a `decay` that is not at least 0 and less than 1.
    """

    def __init__(self, model: nn.Module, decay: float, *, every: int = 1, device: str = "same") -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
            raise InvalidArgument(f"decay={decay!r} must be at least 0 and less than 1, such as 0.999")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidArgument(f"every={every!r} must be an integer of at least 1")
        if device not in ("same", "cpu"):
            raise InvalidArgument(f"device={device!r}: choose 'same' or 'cpu'")
        self.model = model
        self.decay = decay
        self.every = every
        self.device = device
        self.updates = 0
        self._calls = 0
        self._swapped = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        view = view_module("ema", model, {})
        self._averages: dict[str, torch.Tensor] = {}
        self._copies: dict[str, torch.Tensor] = {}
        for key, tensor in self._live().items():
            home = "cpu" if device == "cpu" else tensor.device
            if key in view.parameters and tensor.is_floating_point():
                self._averages[key] = tensor.to(home, torch.float32, copy=True)
            else:
                self._copies[key] = tensor.to(home, copy=True)
        self._inbox: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"EMA(decay={self.decay}, every={self.every}, updates={self.updates})"

    def _live(self) -> dict[str, torch.Tensor]:
        """Return this rank's local tensors by stored key."""
        view = view_module("ema", self.model, {})
        for key, tensor in view.tensors.items():
            if is_subclass(tensor):
                kind = type(local_tensor(tensor)).__name__
                raise Unsupported(f"{key} is the tensor subclass {kind}: EMA cannot average it")
        return {key: local_tensor(t).detach() for key, t in view.tensors.items() if view.stored_key(key) == key}

    @torch.no_grad()
    def update(self) -> None:
        """Count a step, and add the weights to the average at every `every`-th call."""
        if self._swapped:
            raise Unsupported("an update within ema.swap() would average the averaged weights")
        self._calls += 1
        if self._calls % self.every:
            return
        self.settle()
        self.updates += 1
        weight = (1.0 - self.decay) / (1.0 - self.decay**self.updates)
        live = self._live()
        if self.device == "same":
            self._add(live, weight)
            return
        work = (self._copy_to_host(live), weight)
        self._thread = threading.Thread(target=self._add_on_thread, args=work, name="holdfast-ema", daemon=True)
        self._thread.start()

    def _add(self, live: Mapping[str, torch.Tensor], weight: float) -> None:
        """Move the average towards the weights, in three separately rounded operations.

        A fused operation would round vector tails differently, so the result would depend on the layout.
        """
        for keys in self._slices():
            averages = [self._averages[key] for key in keys]
            if weight == 1.0:  # the first update: discard the initial value
                torch._foreach_copy_(averages, [live[key] for key in keys])
                continue
            distances = torch._foreach_sub([live[key].float() for key in keys], averages)
            torch._foreach_mul_(distances, weight)
            torch._foreach_add_(averages, distances)
        for key, copy in self._copies.items():
            if copy.dtype == live[key].dtype:
                copy.copy_(live[key])
            else:  # the model was cast in the meantime; a copy must not round
                self._copies[key] = live[key].to(copy.device, copy=True)

    def _slices(self) -> Iterator[list[str]]:
        """Yield the keys of averages in slices, to bound the memory of temporaries."""
        keys: list[str] = []
        size = 0
        for key, average in self._averages.items():
            keys.append(key)
            size += average.numel() * 4
            if size > _SLICE_BYTES:
                yield keys
                keys, size = [], 0
        if keys:
            yield keys

    def _copy_to_host(self, live: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Copy the weights to host memory, overlapping the next steps; returns a function that waits for the copy."""
        on_device = [key for key, tensor in live.items() if tensor.is_cuda]
        for key, tensor in live.items():
            held = self._inbox.get(key)
            if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                self._inbox[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        for key, tensor in live.items():
            if not tensor.is_cuda:
                self._inbox[key].copy_(tensor)
        if not on_device:
            return lambda: None
        device = live[on_device[0]].device
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        size = sum(live[key].numel() * live[key].element_size() for key in on_device)
        roomy = torch.cuda.mem_get_info(device)[0] > size + _SPARE_BYTES
        sources = {key: live[key].clone() if roomy else live[key] for key in on_device}
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for key, source in sources.items():
                self._inbox[key].copy_(source, non_blocking=True)
                source.record_stream(side)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(side)
        if not roomy:
            current.wait_event(done)
        return done.synchronize

    @torch.no_grad()
    def _add_on_thread(self, wait_for_copy: Callable[[], None], weight: float) -> None:
        try:
            wait_for_copy()
            self._add(self._inbox, weight)
        except BaseException as error:  # noqa: BLE001  (raised by the next call that needs the average)
            self._failure = error

    def settle(self) -> None:
        """Wait until the last update has been added to the average."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @contextmanager
    def swap(self) -> Iterator[nn.Module]:
        """Put the averaged weights into the model within the context; its own weights return bit for bit."""
        if self._swapped:
            raise Unsupported("the model already has the averaged weights: ema.swap() cannot be nested")
        self.settle()
        wait_for_captures()
        live = self._live()
        own = {key: live[key].clone() for key in (*self._averages, *self._copies)}
        with torch.no_grad():
            for key, average in (*self._averages.items(), *self._copies.items()):
                live[key].copy_(average)
        self._swapped = True
        try:
            yield self.model
        finally:
            self._swapped = False
            wait_for_captures()
            live = self._live()
            with torch.no_grad():
                for key, tensor in own.items():
                    live[key].copy_(tensor)

    def holdfast_averages(self) -> dict[str, LikeShard | torch.Tensor]:
        """Return the tensors to save and load by key, sharded like the model's own tensors."""
        if self._swapped:
            raise Unsupported("the model has the averaged weights: save and restore outside of ema.swap()")
        self.settle()
        view = view_module("ema", self.model, {})
        held = {**self._averages, **self._copies}
        return {key: LikeShard(view.tensors[key], tensor) for key, tensor in held.items()}

    def holdfast_count(self) -> dict[str, Any]:
        """Return the counters and settings to save with the averages."""
        return {"updates": self.updates, "calls": self._calls, "decay": self.decay, "every": self.every}

    def holdfast_resume(self, count: Mapping[str, Any]) -> None:
        """Continue from a loaded average; `decay` and `every` stay those of this object."""
        if not {"updates", "calls"} <= count.keys():
            raise Mismatch("the stored average has no counts of updates and calls")
        self.updates, self._calls = int(count["updates"]), int(count["calls"])
