"""When the ranks of a group add up gradients: once per step, with the last micro batch of the replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.parallel.gradients import local_gradient, sum_gradients


class StepSync(Protocol):
    """How the ranks of a group get the gradients of a step."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the batch."""

    @property
    def is_collective(self) -> bool:
        """True if forward and backward communicate within the group: every rank must then run as many of them."""

    @property
    def factor(self) -> int:
        """The number that gradients are multiplied by, so that the ranks' gradients add up."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Run forward and backward of one micro batch within the context."""

    def step(self) -> AbstractContextManager[None]:
        """Run a step within the context: its gradients are added to those that were there. Collective."""


class GradientSync:
    """The gradients of one module over a group: averaged by DDP and FSDP2, added up here for a plain module."""

    def __init__(self, module: nn.Module | None, loss: nn.Module | None, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self.group = group
        self._summed = trained_parameters([loss] if self.is_collective else [module, loss]) if group is not None else []

    @property
    def is_collective(self) -> bool:
        return self.group is not None and isinstance(self._module, (DistributedDataParallel, FSDPModule))

    @property
    def factor(self) -> int:
        """The size of the group where DDP or FSDP2 average, so that the average over the ranks is their sum."""
        return self.group.size() if self.group is not None and self.is_collective else 1

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Gradients travel with the last micro batch only."""
        module = self._module
        if isinstance(module, DistributedDataParallel) and not last:
            with module.no_sync():
                yield
            return
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            module.set_is_last_backward(last)
        yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Add up the gradients that nothing else adds up: those of a plain module, and of the loss."""
        with added_gradients(self._summed):
            yield
            if self.group is not None:
                sum_over_ranks(self.group, self._summed)


def trained_parameters(modules: Sequence[nn.Module | None]) -> list[nn.Parameter]:
    parameters = [parameter for module in modules if module is not None for parameter in module.parameters()]
    return [parameter for parameter in parameters if parameter.requires_grad]


@contextmanager
def added_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Begin without gradients, and add those of before at the end. After an error only those of before are left."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def sum_over_ranks(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Add up the gradients of a group; a parameter that no rank has a gradient of keeps none. Collective."""
    if not parameters:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    trained = [parameter for parameter, one in zip(parameters, used.tolist(), strict=True) if one]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_gradients(group, [local_gradient(parameter) for parameter in trained])
