"""batch_norm over any shards: statistics are summed over the ranks, activations are not moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import local_part, slice_replicas, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.partials import shardable_dims, without_strided_shards
from holdfast.spmd.sharding.shard_sizes import is_shard


class ChannelLayout:
    """The placements of a tensor with channels in dim 1, and of tensors with one value per channel."""

    def __init__(self, source: DTensor, per_channel: Sequence[Any]):
        self.mesh = source.device_mesh
        self.shape = source.shape
        self.places = _places(source, [tensor for tensor in per_channel if _shares_mesh(tensor, source)])
        self.channels: list[Placement] = [
            Shard(0) if is_shard(place) and place.dim == 1 else Replicate() for place in self.places
        ]
        self.summed_axes = [axis for axis, place in enumerate(self.places) if is_shard(place) and place.dim != 1]
        self.count = source.numel() // max(source.shape[1], 1)

    def local(self, tensor: Any) -> torch.Tensor:
        return local_part(slice_replicas(tensor, self.places), self.places, self.mesh)

    def per_channel(self, tensor: Any) -> torch.Tensor | None:
        return None if tensor is None else local_part(tensor, self.channels, self.mesh)

    def total(self, local: torch.Tensor) -> torch.Tensor:
        """Return the sum over every dim but channels, over all ranks."""
        own = local.sum([dim for dim in range(local.ndim) if dim != 1])
        return all_reduce(own, self.mesh, self.summed_axes)

    def wrap(self, local: torch.Tensor) -> DTensor:
        return wrap(local, self.mesh, self.places, self.shape)

    def wrap_channels(self, local: torch.Tensor) -> DTensor:
        return wrap(local, self.mesh, self.channels, (self.shape[1],))


PER_CHANNEL = ("weight", "running_mean", "save_mean")  # tensors of one value per channel
SUMS = 4  # two per channel, each sent twice
ON_ALL = 2  # the cost of an all-reduce, where a reduce-scatter costs 1


def _shares_mesh(tensor: Any, source: DTensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh == source.device_mesh


def _places(source: DTensor, per_channel: Sequence[DTensor]) -> list[Placement]:
    """Keep shards, unless they hold less than the sums would send; reduce a Partial where the total cost is least.

    A replicated tensor is sliced by channels, for free, if the weights or statistics are sharded.
    """
    sums = SUMS * source.shape[1] / source.numel()  # relative to the size of the tensor
    places = without_strided_shards(source.placements)
    for axis, place in enumerate(source.placements):
        by_channels = any(
            tensor.device_mesh == source.device_mesh and tensor.placements[axis] == Shard(0) for tensor in per_channel
        )
        if place.is_replicate() and by_channels and 1 in shardable_dims(source.shape, source.device_mesh, places, axis):
            places[axis] = Shard(1)
    if sums > 1 and not any(isinstance(place, Partial) for place in places):
        return [Replicate() if is_shard(place) and place.dim != 1 else place for place in places]
    for axis, place in enumerate(source.placements):
        if isinstance(place, Partial):
            dims = shardable_dims(source.shape, source.device_mesh, places, axis) if place.reduce_op == "sum" else {}
            costs = {dim: padding + (0 if dim == 1 else sums) for dim, (padding, _, _) in dims.items()}
            dim = min(costs, key=lambda dim: costs[dim], default=None)
            places[axis] = Replicate() if dim is None or costs[dim] > ON_ALL else Shard(dim)
    return places


def _argument(call: Call, *names: str) -> Any:
    """Return the argument with one of these names, which differ between kernels."""
    return next(call[name] for name in names if name in call.names)


def _broadcastable(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (like.ndim - 2))


def forward(call: Call) -> Any:
    """Normalise with the statistics of all ranks, and update the running statistics."""
    source = call["input"]
    training = call["training"] if "training" in call.names else True
    if not isinstance(source, DTensor) or source.ndim < 2 or source.numel() == 0:
        return USE_TORCH
    layout = ChannelLayout(source, [call[name] for name in PER_CHANNEL if name in call.names])
    local = layout.local(source)
    if training:
        exact = local if local.dtype == torch.float64 else local.float()
        mean = layout.total(exact) / layout.count
        centred = exact - _broadcastable(mean, local)
        variance = layout.total(centred * centred) / layout.count
        _update(call, layout, mean, variance)
        saved = (mean, torch.rsqrt(variance + _argument(call, "eps", "epsilon")))
    else:
        mean, variance = layout.per_channel(call["running_mean"]), layout.per_channel(call["running_var"])  # type: ignore[assignment]
        centred = local - _broadcastable(mean, local)
        saved = (mean.new_empty(0), mean.new_empty(0))
    out = centred * _broadcastable(torch.rsqrt(variance + _argument(call, "eps", "epsilon")), local)
    weight, bias = layout.per_channel(call["weight"]), layout.per_channel(call["bias"])
    out = out if weight is None else out * _broadcastable(weight, local)
    out = out if bias is None else out + _broadcastable(bias, local)
    everywhere = [Replicate()] * call.mesh.ndim
    rest = [layout.wrap_channels(item) if training else wrap(item, call.mesh, everywhere, (0,)) for item in saved]
    if len(call.op._schema.returns) == 4:  # cuDNN's reserve space, which the backward here does not read
        rest.append(wrap(local.new_empty(0, dtype=torch.uint8), call.mesh, everywhere, (0,)))
    return layout.wrap(out.to(local.dtype)), *rest


def _update(call: Call, layout: ChannelLayout, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running statistics, under their own placements."""
    momentum = _argument(call, "momentum", "exponential_average_factor")
    unbiased = variance * (layout.count / max(layout.count - 1, 1))
    for name, value in (("running_mean", mean), ("running_var", unbiased)):
        running = call[name] if name in call.names else None
        if running is None:
            continue
        own = _placed_as(running, layout.wrap_channels(value))
        local = local_of(running) if isinstance(running, DTensor) else running
        local.mul_(1 - momentum).add_(own.to(local.dtype), alpha=momentum)


def _placed_as(running: Any, value: DTensor) -> torch.Tensor:
    """Return this rank's part of `value` under the placements of `running`; a Partial is replicated first."""
    mesh = value.device_mesh
    places = list(running.placements) if isinstance(running, DTensor) else [Replicate()] * mesh.ndim
    first = [Replicate() if isinstance(place, Partial) else place for place in places]
    own = local_part(value, first, mesh)
    return own if first == places else local_part(wrap(own, mesh, first, value.shape), places, mesh)


def backward(call: Call) -> Any:
    """Reduce two sums per channel over all ranks; the rest is local."""
    source = call["input"]
    if not isinstance(source, DTensor) or source.ndim < 2 or source.numel() == 0:
        return USE_TORCH
    layout = ChannelLayout(source, [call[name] for name in PER_CHANNEL if name in call.names])
    gradient, local = layout.local(_argument(call, "grad_out", "grad_output")), layout.local(source)
    weight = layout.per_channel(call["weight"])
    train = (
        _argument(call, "train", "update") if {"train", "update"} & set(call.names) else True
    )  # cuDNN's is for training
    if train:
        mean, scale = (
            layout.per_channel(call["save_mean"]),
            layout.per_channel(_argument(call, "save_invstd", "save_var")),
        )
    else:
        mean, running = layout.per_channel(call["running_mean"]), layout.per_channel(call["running_var"])
        scale = None if running is None else torch.rsqrt(running + _argument(call, "eps", "epsilon"))
    assert mean is not None and scale is not None
    normal = (local - _broadcastable(mean, local)) * _broadcastable(scale, local)
    total, total_normal = layout.total(gradient), layout.total(gradient * normal)
    inner = gradient
    if train:
        inner = (
            gradient
            - _broadcastable(total / layout.count, local)
            - normal * _broadcastable(total_normal / layout.count, local)
        )
    factor = scale if weight is None else scale * weight
    wanted = call["output_mask"] if "output_mask" in call.names else (True, weight is not None, weight is not None)
    return (
        layout.wrap((inner * _broadcastable(factor, local)).to(local.dtype)) if wanted[0] else None,
        layout.wrap_channels(total_normal) if wanted[1] else None,
        layout.wrap_channels(total) if wanted[2] else None,
    )


WHY = "torch gathers the activations, forgets running statistics of channel shards, and hangs on empty shards"
FORWARD = (
    *("native_batch_norm.default", "cudnn_batch_norm.default", "_batch_norm_with_update.default"),
    *("_native_batch_norm_legit.default", "_native_batch_norm_legit.no_stats"),
)
BACKWARD = ("native_batch_norm_backward.default", "cudnn_batch_norm_backward.default", "batch_norm_backward.default")
RULES = [
    Rule("norm", FORWARD, "batch, channels, space", WHY, forward),
    Rule("norm", BACKWARD, "batch, channels, space", WHY, backward),
]
