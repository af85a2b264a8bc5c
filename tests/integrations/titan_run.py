"""A small torchtitan run on the CPU: its Llama, optimizer, scheduler, loader and overrides, without its GPU parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.llama3 import model_registry

STEPS, INTERVAL = 12, 3


@dataclass(frozen=True)
class RunResult:
    """The steps of a run, each with its loss and the sum of its tokens, and the step it began from."""

    began: int
    log: list[tuple[int, str, int]]
    replaced: list[str]


class _Root(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        checkpoint: BaseCheckpointManager.Config = field(default_factory=CheckpointManager.Config)


class _Tokens(IterableDataset):
    """Endless random tokens of a rank; its state is the number of samples drawn."""

    def __init__(self, rank: int):
        self.rank, self.drawn = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.drawn)
            self.drawn += 1
            yield torch.randint(0, 2048, (17,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class _PlainAttention(torch.nn.Module):
    """Attention on the CPU, in place of the compiled one."""

    def forward(self, q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any, enable_gqa: bool) -> torch.Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        made = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return made.transpose(1, 2)


class TrainState:
    """What torchtitan's trainer contributes to a checkpoint."""

    step = 0
    ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def make_model() -> tuple[torch.nn.Module, Any, Any]:
    """Return a Llama of two layers with fused q, k and v, its spec and its config."""
    spec = model_registry("debugmodel")
    config = spec.model
    config.layers = config.layers[:2]
    torch.manual_seed(0)
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for layer in model.layers.values():
        layer.attention.inner_attention = _PlainAttention()
    return model, spec, config


def checkpoint_config(folder: str, **options: Any) -> tuple[Any, list[str]]:
    """Return the config of the checkpointer as torchtitan has it after `--override.imports`, and its log lines."""
    root = _Root.Config(
        checkpoint=CheckpointManager.Config(enable=True, folder=folder, interval=INTERVAL, keep_latest_k=2, **options)
    )
    lines = apply_overrides(OverrideConfig(imports=["holdfast.integrations.torchtitan.use"]), root)
    return root.checkpoint, lines


def train(folder: str, stop: str | None = None, assets: str | None = None) -> RunResult:
    """Train 12 steps from the newest checkpoint; create the file `stop` after step 7, to be killed."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, spec, config = make_model()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = OptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(
                pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.0}
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
        ],
    ).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=STEPS)
    loader = ParallelAwareDataloader(_Tokens(rank), dp_rank=rank, dp_world_size=world, batch_size=2)
    state = TrainState()
    options, replaced = checkpoint_config(folder)
    manager = options.build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=spec.state_dict_adapter(config, assets),
        base_folder="",
    )
    manager.load()
    began, log = state.step, []
    batches = iter(loader)
    while state.step < STEPS:
        state.step += 1
        tokens = next(batches)
        logits = model(tokens[:, :-1], positions=torch.arange(16).repeat(len(tokens), 1))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        log.append((state.step, loss.item().hex(), int(tokens.sum())))
        manager.save(state.step, last_step=state.step == STEPS)
        if state.step == 7 and stop is not None:
            manager._wait_for_saving()
            Path(stop).with_name(f"stop-{os.environ['RANK']}").touch()
            if rank == 0:
                Path(stop).touch()
    manager.close()
    return RunResult(began, log, replaced)
