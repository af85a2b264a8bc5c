"""Runs of the trainer for tests: tiny models, what a rank holds at the end, and what its routers chose."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.core.names import step_folder
from holdfast.train.checkpoints import FOLDER
from holdfast.train.config import RunConfig, parse_config
from holdfast.train.loop import Progress, Trainer
from holdfast.train.metrics import read_metrics
from holdfast.train.models.decoder import DecoderBlock
from holdfast.train.models.experts import Experts
from tests.dist.harness import tell_parent

_CONFIG = """
[model]
family = "{family}"
vocab_size = 32
hidden_size = 16
intermediate_size = 24
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 2
initializer_range = 0.1
{experts}
[data]
samples = 50
sequence = 8
evaluation_samples = 3
[optimizer]
lr = 1e-2
eps = 1e-6
[schedule]
warmup_steps = 3
[train]
global_batch = 8
[checkpoint]
keep_last = 0
"""
_EXPERTS = "num_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\nrouter_aux_loss_coef = 0.01\n"
_DROPOUT = "attention_dropout = 0.1\nresidual_dropout = 0.1\nembedding_dropout = 0.1\n"


def config(
    folder: str | Path,
    layout: dict[str, Any],
    *,
    sparse: bool = False,
    dropout: bool = False,
    layers: int = 4,
    **sets: Any,
) -> RunConfig:
    """A run of a tiny model; `sets` are settings with a double underscore for the point."""
    extra = (_EXPERTS if sparse else "") + (_DROPOUT if dropout else "")
    text = _CONFIG.format(family="qwen3_moe" if sparse else "llama", layers=layers, experts=extra)
    given = {f"layout.{name}": value for name, value in layout.items()}
    given |= {name.replace("__", "."): value for name, value in sets.items()}
    words = {True: "true", False: "false"}
    assignments = [
        f"{name}={words.get(value, value) if isinstance(value, bool) else value}" for name, value in given.items()
    ]
    return parse_config(text, [*assignments, f'train.folder="{folder}"'])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held(trainer: Trainer) -> dict[str, str]:
    """Digests of all that this rank has: weights, optimizer, average, random streams, place in the data."""
    tensors = {f"model/{key}": local(p) for key, p in trainer.replica.module.named_parameters()}
    inner = getattr(trainer.optimizer, "optim", trainer.optimizer)
    for key, parameter in trainer.replica.module.named_parameters():
        tensors |= {f"optimizer/{key}/{name}": local(value) for name, value in inner.state.get(parameter, {}).items()}
    if trainer.ema is not None:
        tensors |= {f"ema/{key}": value for key, value in trainer.ema._averages.items()}
    tensors |= {f"random/{key}": value for key, value in trainer.streams.state_dict()["streams"].items()}
    digests = {key: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for key, value in tensors.items()}
    return digests | {"position": str(trainer.position.state_dict()), "step": str(trainer.streams.step)}


def losses(folder: str | Path) -> dict[int, float]:
    steps, _ = read_metrics(Path(folder) / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in steps}


def _noisy(trainer: Trainer) -> Trainer:
    """Add what a user's own module might: noise from torch's generator, which the trainer's streams stand behind."""

    def add_noise(module: Any, arguments: Any, out: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return out[0] + 0.01 * torch.randn_like(out[0]), out[1]

    for module in trainer.replica.module.modules():
        if isinstance(module, DecoderBlock):
            module.register_forward_hook(add_noise)
    return trainer


def finish(settings: RunConfig) -> tuple[int, dict[str, str]]:
    """Train to the end, with noise; the step it resumed from, and what this rank has then."""
    trainer = _noisy(Trainer(settings))
    outcome = trainer.run()
    assert outcome.step == settings.train.steps
    return outcome.resumed_from, held(trainer)


def train_until_killed(settings: RunConfig, hold_at: int) -> None:
    """Train on and on, and wait at one step, with the save before it published, for the kill that is to come."""
    saved = hold_at - hold_at % settings.checkpoint.every_steps
    published = Path(settings.train.folder) / FOLDER / step_folder(saved)

    def wait(progress: Progress) -> None:
        if progress.step == hold_at:
            while not published.exists():  # the parent's deadline ends it
                time.sleep(0.01)
            tell_parent("held")
            time.sleep(600)

    _noisy(Trainer(settings)).run(wait)


def finish_then_train(done: RunConfig, doomed: RunConfig, hold_at: int) -> None:
    """Finish one run and tell of it, then train another until killed."""
    tell_parent(finish(done))
    train_until_killed(doomed, hold_at)


class Routing:
    """What the routers of a rank chose: by layer, tokens of each micro batch in turn."""

    def __init__(self, trainer: Trainer) -> None:
        self.chosen: dict[str, list[torch.Tensor]] = {}
        for name, module in trainer.replica.module.named_modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            self.chosen.setdefault(name, []).append(arguments[1].detach().sort(dim=-1).values.clone())

        return note
