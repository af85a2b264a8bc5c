"""Build this rank's part of a model for a layout: stages, their sharding, initial values, gradient groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.train.layout import Layout
from holdfast.train.loss import LossSums, MicroBatch, Objective
from holdfast.train.models.decoder import TIES, Decoder
from holdfast.train.models.initial import fill_initial
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.gradients import GradientSums
from holdfast.train.parallel.meshes import Meshes, make_meshes
from holdfast.train.parallel.model_replica import ModelReplica
from holdfast.train.parallel.pipeline import Pipeline
from holdfast.train.parallel.sharding import shard_experts, shard_stage
from holdfast.train.parallel.tensor_parallel import apply_tensor_parallel

__all__ = ["Layout", "LossSums", "MicroBatch", "ModelReplica", "build"]


def build(
    config: ModelConfig,
    layout: Layout,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    recompute: bool = False,
    head: bool = True,
) -> ModelReplica:
    """Build this rank's part of a model, with initial values independent of the layout. Collective.

    Parameters are fp32; `dtype` is the compute dtype. `recompute` enables activation checkpointing of
    blocks. `head=False` leaves out the head, for embeddings. Raises InvalidArgument for an invalid layout.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout.check(world, config)
    device = torch.device(device)
    meshes = make_meshes(layout, device, with_experts=config.traits.experts)
    options: dict[str, Any] = {"compute_dtype": dtype, "recompute": recompute, "head": head}
    stages = {number: _stage(number, config, layout, options) for number in layout.stages_of(meshes.at("pp"))}
    for stage in stages.values():
        if meshes.group("tp") is not None and meshes.dense is not None:
            apply_tensor_parallel(stage, meshes.dense["tp"])
        if meshes.experts is not None:
            shard_experts(stage, meshes.experts["expert"])
        shard_stage(stage, meshes, dtype)
        stage.to_empty(device=device)
        stage.tie()
        fill_initial(stage, config, seed, TIES if config.tie_word_embeddings else {})
    module = join_stages(list(stages.values()), head=head)
    objective = Objective(config, meshes.group("tp"))
    pipeline = None
    if (group := meshes.group("pp")) is not None:
        pipeline = Pipeline(layout, config, list(stages.items()), group, device, objective)
    tied = config.tie_word_embeddings and head
    sums = gradient_sums(meshes, module, tied=tied)
    return ModelReplica(config, meshes, module, objective, pipeline, sums, device)


def _stage(number: int, config: ModelConfig, layout: Layout, options: dict[str, Any]) -> Decoder:
    layers, last = layout.layers_of(number, config), number == layout.stages - 1
    with torch.device("meta"):
        return Decoder(config, layers, first=number == 0, last=last, **options)


def join_stages(stages: Sequence[Decoder], *, head: bool = True) -> Decoder:
    """Join the stages of one rank into one module with the keys of the whole model; it is never called."""
    if len(stages) == 1:
        return stages[0]
    with torch.device("meta"):
        whole = Decoder(stages[0].config.model, [], first=False, last=False, head=head)
    for stage in stages:
        whole.model.layers.update(dict(stage.model.layers.items()))
        for name, part in stage.model.named_children():
            if name != "layers":
                whole.model.add_module(name, part)
        if stage.has_head:
            whole.lm_head = stage.lm_head
    return whole


def gradient_sums(meshes: Meshes, module: nn.Module, *, tied: bool) -> GradientSums:
    """Return the gradients that FSDP does not reduce, with the groups to reduce them over. Collective."""
    keys = {key for key, parameter in module.named_parameters() if parameter.requires_grad}
    apart = {key for key in keys if ".mlp.experts." in key} if meshes.experts is not None else set()
    over: list[tuple[Any, frozenset[str]]] = []
    if meshes.layout.dp_shard == 1 and (group := meshes.group("dp_replicate")) is not None:
        over.append((group, frozenset(keys - apart)))
    if meshes.layout.expert_shard == 1 and (group := meshes.group("expert_replicate")) is not None:
        over.append((group, frozenset(apart)))
    if not tied or meshes.layout.pp == 1:
        return GradientSums(tuple(over))
    alias, key = next(iter(TIES.items()))
    group = _ends_group(meshes)
    here = key if key in keys else alias if alias in keys else None
    ties = (group, here) if group is not None and here is not None else None
    return GradientSums(tuple(over), ties, frozenset({alias} & keys))


def _ends_group(meshes: Meshes) -> dist.ProcessGroup | None:
    """Return the group of this rank's first and last pipeline rank; None on ranks in between. Collective."""
    assert meshes.dense is not None
    own = None
    for line in meshes.dense.mesh.flatten(1).t().tolist():
        group = dist.new_group([line[0], line[-1]])
        if dist.get_rank() in (line[0], line[-1]):
            own = group
    return own
