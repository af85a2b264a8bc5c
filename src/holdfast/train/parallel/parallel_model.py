"""A model on a layout: built, trained and evaluated the same way whatever the layout is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.train.layout import Layout
from holdfast.train.loss import LossSums, MicroBatch, Objective
from holdfast.train.model_replica import Trainee
from holdfast.train.models.config import ModelConfig
from holdfast.train.models.decoder import TIES, Decoder
from holdfast.train.models.initial import fill_initial
from holdfast.train.parallel.gradients import Summing
from holdfast.train.parallel.meshes import Meshes, make_meshes
from holdfast.train.parallel.pipeline import Pipeline
from holdfast.train.parallel.sharding import shard_stage, spread_experts
from holdfast.train.parallel.tensor_parallel import cut_by_tensor

__all__ = ["Layout", "LossSums", "MicroBatch", "Trainee", "build"]


def build(
    config: ModelConfig,
    layout: Layout,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    recompute: bool = False,
) -> Trainee:
    """This rank's part of a model, with initial values that do not depend on the layout. Collective.

    Parameters are fp32; `dtype` is what the layers compute in. `recompute` keeps only the
    inputs of blocks for backward and computes the rest again. Raises InvalidArgument, before
    anything is made, for a layout that cannot be.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout.check(world, config)
    device = torch.device(device)
    meshes = make_meshes(layout, device, with_experts=config.traits.experts)
    stages = {number: _stage(number, config, layout, dtype, recompute) for number in layout.stages_of(meshes.at("pp"))}
    for stage in stages.values():
        if meshes.group("tp") is not None and meshes.dense is not None:
            cut_by_tensor(stage, meshes.dense["tp"])
        if meshes.experts is not None:
            spread_experts(stage, meshes.experts["expert"])
        shard_stage(stage, meshes, dtype)
        stage.to_empty(device=device)
        stage.tie()
        fill_initial(stage, config, seed, TIES if config.tie_word_embeddings else {})
    module = joined(list(stages.values()))
    objective = Objective(config, meshes.group("tp"))
    pipeline = None
    if (group := meshes.group("pp")) is not None:
        pipeline = Pipeline(layout, config, list(stages.items()), group, device, objective)
    return Trainee(config, meshes, module, objective, pipeline, _summing(config, meshes, module), device)


def _stage(number: int, config: ModelConfig, layout: Layout, dtype: torch.dtype, recompute: bool) -> Decoder:
    with torch.device("meta"):
        return Decoder(
            config,
            layout.layers_of(number, config),
            first=number == 0,
            last=number == layout.stages - 1,
            recompute=recompute,
            compute_dtype=dtype,
        )


def joined(stages: Sequence[Decoder]) -> Decoder:
    """The stages of one rank as one module with the keys of the whole model. It is never called."""
    if len(stages) == 1:
        return stages[0]
    with torch.device("meta"):
        whole = Decoder(stages[0].config.model, [], first=False, last=False)
    for stage in stages:
        whole.model.layers.update(dict(stage.model.layers.items()))
        for name, part in stage.model.named_children():
            if name != "layers":
                whole.model.add_module(name, part)
        if stage.is_last:
            whole.lm_head = stage.lm_head
    return whole


def _summing(config: ModelConfig, meshes: Meshes, module: nn.Module) -> Summing:
    """Which gradients FSDP does not sum, and over which ranks they are to be summed. Collective."""
    keys = {key for key, _ in module.named_parameters()}
    apart = {key for key in keys if ".mlp.experts." in key} if meshes.experts is not None else set()
    over: list[tuple[Any, frozenset[str]]] = []
    if meshes.layout.dp_shard == 1 and (group := meshes.group("dp_replicate")) is not None:
        over.append((group, frozenset(keys - apart)))
    if meshes.layout.expert_shard == 1 and (group := meshes.group("expert_replicate")) is not None:
        over.append((group, frozenset(apart)))
    if not config.tie_word_embeddings or meshes.layout.pp == 1:
        return Summing(tuple(over))
    alias, key = next(iter(TIES.items()))
    group = _ends_group(meshes)
    here = key if key in keys else alias if alias in keys else None
    ties = (group, here) if group is not None and here is not None else None
    return Summing(tuple(over), ties, frozenset({alias} & keys))


def _ends_group(meshes: Meshes) -> dist.ProcessGroup | None:
    """First and last pipeline rank at this rank's other coordinates; None on ranks between. Collective."""
    assert meshes.dense is not None
    own = None
    for line in meshes.dense.mesh.flatten(1).t().tolist():
        group = dist.new_group([line[0], line[-1]])
        if dist.get_rank() in (line[0], line[-1]):
            own = group
    return own
