"""The two passes of a step with an encoder that is called: all micro batches without a graph, then with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.gradient_sync import StepSync
from holdfast.train.embedding.replay import RandomState, replayed


class ModulePasses:
    """The passes of one step: `forward` before the loss, `backward` after it."""

    def __init__(self, encode: Callable[[Any], torch.Tensor], module: nn.Module | None, sync: StepSync) -> None:
        self._encode = encode
        self._module = module
        self._sync = sync
        self._states: list[RandomState] = []  # before each micro batch
        self._idle = 0  # micro batches to run for nothing: where forward communicates, all ranks run as many

    @torch.no_grad()
    def forward(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the embeddings of each micro batch, after as many forward passes as every other rank's."""
        device = device_of(inputs[:1], self._module)
        if self._sync.is_collective:  # ranks agree before the first pass: it may use the same process group
            self._idle = most_of_ranks(len(inputs), self._sync.group, device) - len(inputs)
        embeddings = []
        for rows in inputs:
            self._states.append(RandomState(device))
            embeddings.append(checked_embedding(self._encode(rows)).detach())
        for _ in range(self._idle):
            with replayed(self._states[0]):
                self._encode(inputs[0])
        torch.clear_autocast_cache()  # rounded weights of this pass have no graph, which the second one needs
        return embeddings

    def backward(self, inputs: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
        """Encode again with the same random numbers, and carry the gradients of the embeddings to the weights."""
        first = (inputs[0], torch.zeros_like(gradients[0]), self._states[0])
        trained = False
        todo = [first] * self._idle + list(zip(inputs, gradients, self._states, strict=True))
        for number, (rows, gradient, state) in enumerate(todo):
            with self._sync.micro_batch(last=number == len(todo) - 1), torch.enable_grad():
                with replayed(state):
                    embedding = self._encode(rows)
                if embedding.requires_grad:  # else rows of an encoder that is frozen, beside one that is trained
                    trained = True
                    embedding.backward((gradient * self._sync.factor).to(embedding.dtype))  # type: ignore[no-untyped-call]
        if not trained:
            raise InvalidArgument(
                "encode returned embeddings without gradients: all parameters are frozen, or encode detaches them"
            )

    def on_every_rank(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `compute` returns: every rank has embeddings."""
        return compute()


def checked_embedding(found: Any) -> torch.Tensor:
    """Return what `encode` returned, if it is a tensor."""
    if isinstance(found, torch.Tensor):
        return found
    way = ""
    if isinstance(found, Mapping):
        way = f": give a function that returns one of {', '.join(map(repr, found))}, and the encoder as module="
    raise InvalidArgument(f"encode returned a {type(found).__name__}; expected a tensor [rows, dim]{way}")


def most_of_ranks(count: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Return the highest count of a group. Collective."""
    if group is None:
        return count
    most = torch.tensor([count], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def device_of(inputs: Sequence[Any], module: nn.Module | None) -> torch.device:
    """Return the device that a module and its inputs are on; that of the CPU if they are on no other."""
    values = [value for rows in inputs for value in (rows.values() if isinstance(rows, Mapping) else [rows])]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    tensors += [] if module is None else module.parameters()
    found = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return next(iter(found), torch.device("cpu"))
