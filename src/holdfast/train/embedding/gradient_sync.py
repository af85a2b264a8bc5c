"""When the ranks of a group add up gradients: once per step, with the last micro batch of the replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.parallel.gradients import local_gradient, sum_gradients


class GradientSync:
    """The gradients of one module over a group: averaged by DDP and FSDP2, added up here for a plain module."""

    def __init__(self, module: nn.Module | None, loss: nn.Module | None, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        summed = [loss] if self.is_wrapped else [module, loss]
        own = [parameter for part in summed if part is not None for parameter in part.parameters()]
        self._summed = [parameter for parameter in own if parameter.requires_grad] if group is not None else []

    @property
    def is_wrapped(self) -> bool:
        """True if forward and backward communicate: every rank must then run as many of them."""
        return self._group is not None and isinstance(self._module, (DistributedDataParallel, FSDPModule))

    @property
    def factor(self) -> int:
        """By what gradients are multiplied, so that the average over the ranks is their sum."""
        return self._group.size() if self._group is not None and self.is_wrapped else 1

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Run forward and backward of one micro batch; gradients travel with the last one only."""
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
        """Add up the gradients of this step that nothing else has, and add them to those that were there. Collective.

        These are the gradients of a plain module, and of the loss.
        """
        before = [parameter.grad for parameter in self._summed]
        for parameter in self._summed:
            parameter.grad = None
        try:
            yield
            self._sum()
        finally:
            for parameter, gradient in zip(self._summed, before, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _sum(self) -> None:
        if self._group is None or not self._summed:
            return
        used = torch.tensor([parameter.grad is not None for parameter in self._summed], dtype=torch.int32)
        used = used.to(self._summed[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        trained = [parameter for parameter, one in zip(self._summed, used.tolist(), strict=True) if one]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients(self._group, [local_gradient(parameter) for parameter in trained])
