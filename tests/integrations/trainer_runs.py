"""Runs of a small Trainer with Holdfast, for ranks that the launcher forks: what was logged, trained and kept."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from holdfast.core.warnings import HoldfastWarning
from holdfast.integrations.transformers import attach

SAMPLES, LENGTH, VOCABULARY = 26, 12, 64
# Measured times, which no two runs share.
_TIMES = ("runtime", "per_second", "step_time")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def make_model(vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=128,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make_arguments(folder: str | os.PathLike[str], kind: type = TrainingArguments, **changes: Any) -> Any:
    if os.environ.get("WORLD_SIZE") == "1":  # a plain process, without a process group
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    if "RANK" in os.environ:
        options["ddp_backend"] = "gloo"
    sharded = changes.pop("fsdp2", False)
    if sharded:
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    made = kind(**(options | changes))
    if sharded:
        # accelerate turns FSDP on for GPUs only, and trains without it on CPUs, silently.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


class Batches:
    """A part of a trainer that notes each batch at the step that trains on it."""

    trained: list[tuple[int, str]]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        trainer: Any = self
        content = inputs["input_ids"].tolist() if isinstance(inputs, dict) else inputs
        digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
        trainer.__dict__.setdefault("trained", []).append((trainer.state.global_step, digest))
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss


class NotedTrainer(Batches, Trainer):
    """Trainer, noting its batches."""


class KillAt(TrainerCallback):
    """Asks to be killed once a step has ended, and trains on until that happens, but not past the end."""

    def __init__(self, step: int, file: str) -> None:
        self._step, self._file = step, Path(file)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._file.touch()
        if state.global_step >= min(self._step + 2, state.max_steps):
            time.sleep(60)


def run(
    folder: str,
    changes: dict[str, Any],
    kill_step: int | None = None,
    resume: Any = True,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train the small model with Holdfast attached, and report."""
    trainer = make_trainer(folder, changes)
    attach(trainer, **(options or {}))
    return train(trainer, folder, resume, kill_step)


def run_with_lines(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train the small model with Holdfast attached, and report, with what a restart logs of a finished run."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return run(folder, changes) | {"finished": [line for line in lines if "nothing is left to train" in line]}


def run_with_notes(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train on, on another mesh, and report what the load says about that."""
    trainer = make_trainer(folder, changes)
    trainer.not_saved = 3
    attach(trainer, carry=["not_saved"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldfastWarning)
        trainer.train(resume_from_checkpoint=True)
    noted = {"notes": [str(one.message) for one in caught], "files": sorted({one.filename for one in caught})}
    return report(trainer, folder) | noted


def make_trainer(folder: str, changes: dict[str, Any], **given: Any) -> Any:
    """Make the trainer; `scaler` and `patience` are options of these tests, the others are TrainingArguments."""
    arguments = dict(changes)
    scaler, patience = arguments.pop("scaler", False), arguments.pop("patience", None)
    made = make_arguments(folder, **arguments)
    given = {"train_dataset": Sentences(), "eval_dataset": Sentences(8)} | given
    trainer = NotedTrainer(make_model(), made, **given)
    assert trainer.is_fsdp_enabled is bool(changes.get("fsdp2"))
    if scaler:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
    if patience is not None:
        trainer.add_callback(EarlyStoppingCallback(patience))
    return trainer


def train(trainer: Any, folder: str, resume: Any = True, kill_step: int | None = None) -> dict[str, Any]:
    if kill_step is not None:
        trainer.add_callback(KillAt(kill_step, f"{folder}/kill"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        warnings.filterwarnings("ignore", ".*has PEFT adapters", HoldfastWarning)
        output = trainer.train(resume_from_checkpoint=resume)
    return report(trainer, folder) | {"train_loss": float(output.training_loss).hex()}


def report(trainer: Any, folder: str) -> dict[str, Any]:
    """Return everything that two runs that are one must have in common."""
    first = next((step for step, _ in trainer.__dict__.get("trained", ())), None)
    return {
        "log": [exact(entry) for entry in trainer.state.log_history],
        "trained": trainer.__dict__.get("trained", []),
        "first": first,
        "weights": weights(trainer.model),
        "steps": sorted(path.name for path in Path(folder).glob("step-*")),
        "best": trainer.state.best_global_step,
        "step": trainer.state.global_step,
    }


def exact(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a log entry bit for bit, without times."""
    return {
        name: value.hex() if isinstance(value, float) else value
        for name, value in entry.items()
        if not any(part in name for part in _TIMES)
    }


def weights(model: nn.Module) -> str:
    """Return a digest of the weights, gathered."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode() + whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
