"""Experts sharded over ranks as DTensors, and FSDP2 on every block, with summed gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.train.models.decoder import Decoder
from holdfast.train.models.experts import Experts
from holdfast.train.parallel.meshes import Meshes


def shard_experts(stage: Decoder, mesh: DeviceMesh) -> None:
    """Shard every layer's experts evenly over the ranks of the mesh; their numbers stay global."""
    for experts in _experts_of(stage):
        for name, parameter in list(experts.named_parameters()):
            spread = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(spread))
        experts.group = mesh.get_group()


def shard_stage(stage: Decoder, meshes: Meshes, compute_dtype: torch.dtype) -> None:
    """Apply FSDP2 to every block and to the rest. Experts are sharded over ranks with the same experts."""
    layout, dense = meshes.layout, meshes.dense
    if dense is None or layout.dp_shard == 1:
        return
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False),
        "reshard_after_forward": layout.pp == 1,  # a pipeline would all-gather again for every micro batch
    }
    mesh = dense["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else dense["dp_shard"]
    ignored: set[nn.Parameter] = set()
    if meshes.experts is not None:
        for experts in _experts_of(stage):
            if layout.expert_shard == 1:
                ignored |= set(experts.parameters())
            else:
                _apply_fsdp_to_experts(experts, meshes.experts, layout.expert_replicate > 1, options)
    for block in stage.model.layers.values():
        fully_shard(block, mesh=mesh, ignored_params=ignored, **options)
    fully_shard(stage, mesh=mesh, ignored_params=ignored, **options)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Losses are already divided by the tokens of the global batch.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _apply_fsdp_to_experts(experts: Experts, mesh: DeviceMesh, replicated: bool, options: dict[str, Any]) -> None:
    mesh = mesh["expert_replicate", "expert_shard"] if replicated else mesh["expert_shard"]
    parts = mesh.size(-1)
    even = all(parameter.shape[1] % parts == 0 for parameter in experts.parameters())
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1) if even else Shard(0), **options)


def _experts_of(stage: Decoder) -> Iterator[Experts]:
    for module in stage.modules():
        if isinstance(module, Experts):
            yield module
