"""nn.SyncBatchNorm on DTensors and on the CPU, where torch refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.spmd_errors import UnsupportedCall


def forward_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return SyncBatchNorm.forward: a DTensor synchronises over its mesh, a plain tensor over its process group."""

    def forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        if isinstance(input, DTensor):
            _check_ranks(self.process_group, input)
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if input.device.type != "cpu" or not self.training or group is None:
            return original(self, input)
        if dist.get_world_size(group) < 2:
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        means = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        momentum = _momentum(self)
        arguments = (input, self.weight, self.bias, *means, self.eps, momentum, group)
        return _Synchronised.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]

    return forward


def _check_ranks(group: Any, tensor: DTensor) -> None:
    """Refuse a process group with ranks outside of the DTensor's mesh, whose values could not be reduced."""
    ranks = set(dist.get_process_group_ranks(group)) if group is not None else set()
    here = {int(rank) for rank in tensor.device_mesh.mesh.flatten()}
    if not ranks <= here:
        raise UnsupportedCall(
            f"SyncBatchNorm: the process group has ranks {sorted(ranks)}, the mesh of the input only {sorted(here)}; "
            "give the module a group within the mesh, or none"
        )


def _momentum(module: nn.SyncBatchNorm) -> float:
    if not module.track_running_stats or module.num_batches_tracked is None:
        return module.momentum or 0.0
    module.num_batches_tracked.add_(1)
    return 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum


class _Synchronised(torch.autograd.Function):
    """batch_norm of plain tensors with the statistics of all ranks of a group; batch sizes may differ."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float,
        group: Any,
    ) -> torch.Tensor:
        exact = source if source.dtype == torch.float64 else source.float()
        count = exact.new_full((1,), source.numel() // source.shape[1])
        summed = _summed(torch.cat([_per_channel(exact), count]), group)
        total = float(summed[-1])
        if total < 2:
            raise ValueError(f"SyncBatchNorm expects more than 1 value per channel over all ranks, got {total:.0f}")
        mean = summed[:-1] / total
        centred = exact - _broadcastable(mean, exact)
        variance = _summed(_per_channel(centred * centred), group) / total
        for running, value in ((running_mean, mean), (running_var, variance * total / (total - 1))):
            if running is not None:
                running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)
        scale = torch.rsqrt(variance + eps)
        normal = centred * _broadcastable(scale, exact)
        ctx.save_for_backward(normal, weight, scale)
        ctx.group, ctx.total = group, total
        output = normal if weight is None else normal * _broadcastable(weight, exact)
        output = output if bias is None else output + _broadcastable(bias, exact)
        return output.to(source.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return this rank's own gradient of the parameters, as torch's SyncBatchNorm does: DDP averages them."""
        normal, weight, scale = ctx.saved_tensors
        exact = gradient.to(normal.dtype)
        own = torch.cat([_per_channel(exact), _per_channel(exact * normal)])
        of_bias, of_weight = own.chunk(2)
        first, second = (_summed(own, ctx.group) / ctx.total).chunk(2)
        factor = scale if weight is None else scale * weight
        inner = (exact - _broadcastable(first, normal) - normal * _broadcastable(second, normal)) * _broadcastable(
            factor, normal
        )
        learned = (None, None) if weight is None else (of_weight.to(weight.dtype), of_bias.to(weight.dtype))
        return inner.to(gradient.dtype), *learned, None, None, None, None, None


def _per_channel(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum([dim for dim in range(tensor.ndim) if dim != 1])


def _broadcastable(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (like.ndim - 2))


def _summed(values: torch.Tensor, group: Any) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total
