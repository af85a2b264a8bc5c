"""Sums of gradients that FSDP does not reduce, after backward, in buckets over process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

BUCKET_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class GradientSums:
    """The keys whose gradients are partial sums over a process group, by group.

    All ranks use the same order of groups. `ties` is reduced last: the copies of a tied weight on two
    pipeline stages, each with the gradient of its own use.
    """

    over: tuple[tuple[dist.ProcessGroup, frozenset[str]], ...] = ()
    ties: tuple[dist.ProcessGroup, str] | None = None
    copies: frozenset[str] = field(default_factory=frozenset)  # keys that another rank counts


def finish_gradients(parameters: Mapping[str, nn.Parameter], gradient_sums: GradientSums) -> None:
    """Reduce every gradient to that of the global batch, in the layout of its parameter. Collective."""
    for parameter in parameters.values():
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = torch.zeros_like(parameter)
        elif isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            # Norms and routers see a slice of the sequence, so their gradients are partial sums.
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for group, keys in gradient_sums.over:
        sum_gradients(group, [local_gradient(parameters[key]) for key in sorted(keys)])
    if gradient_sums.ties is not None:
        group, key = gradient_sums.ties
        sum_gradients(group, [local_gradient(parameters[key])])


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's local gradient."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def sum_gradients(group: dist.ProcessGroup, gradients: Iterable[torch.Tensor]) -> None:
    """Add up gradients over a group, in place. Collective."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(part.numel() for part in bucket) >= BUCKET_ELEMENTS:
            _sum_bucket(group, bucket)
            bucket = []
    if bucket:
        _sum_bucket(group, bucket)


def _sum_bucket(group: dist.ProcessGroup, bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([part.reshape(-1) for part in bucket])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(bucket, torch.split(flat, [part.numel() for part in bucket]), strict=True):
        part.copy_(summed.view_as(part))
