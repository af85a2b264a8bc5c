"""The norm and the clipping of sharded and replicated gradients: every element of the model counts once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.train.parallel.gradients import local_gradient


def gradient_norm(parameters: Mapping[str, nn.Parameter], stage_ranks: int, copies: Collection[str] = ()) -> float:
    """Return the L2 norm over the whole model. Collective if there are several ranks.

    An element held by r ranks of a stage counts 1/r on each. `copies` are keys counted by another stage:
    a tied weight is one parameter on two stages.
    """
    counted = {key: parameter for key, parameter in parameters.items() if key not in copies}
    norms = torch.stack(torch._foreach_norm([local_gradient(p).float() for p in counted.values()])).double()
    shares = [shards_of(parameter) / stage_ranks for parameter in counted.values()]
    total = (norms.square() * torch.tensor(shares, dtype=torch.float64, device=norms.device)).sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return math.sqrt(float(total))


def shards_of(parameter: torch.Tensor) -> int:
    """Return the number of distinct shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = parameter.device_mesh.shape
    sharded = (size for size, place in zip(sizes, parameter.placements, strict=True) if not place.is_replicate())
    return math.prod(sharded)


def clip_gradients(parameters: Mapping[str, nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`."""
    if norm <= max_norm:
        return
    torch._foreach_mul_([local_gradient(p) for p in parameters.values()], max_norm / (norm + 1e-6))
