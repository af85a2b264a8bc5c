"""Random numbers that a forward pass drew once and draws again: the states of torch's generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomState:
    """The states of torch's generators, on the CPU and on the device that a model uses, at one moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._accelerator = None if device.type == "cpu" else _module(device).get_rng_state(device)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            _module(self.device).set_rng_state(self._accelerator, self.device)


@contextmanager
def replayed(state: RandomState) -> Iterator[None]:
    """Draw the numbers that follow `state`, and go on afterwards as if none had been drawn."""
    now = RandomState(state.device)
    state.restore()
    try:
        yield
    finally:
        now.restore()


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)  # torch.cuda, torch.xpu, ...
