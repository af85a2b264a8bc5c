"""Training loops with accelerate that the tests stop and resume: every step logs its loss and its samples."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.integrations.accelerate import AccelerateCheckpointer, attach

EPOCHS = 3


class Noisy(Dataset):
    """Samples that are made noisy when fetched, in the main process: its random numbers count too."""

    def __init__(self, size: int, noise: float = 0.01) -> None:
        self._rows = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / (6 * size)
        self._noise = noise

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._rows[index] + (torch.randn(6) + random.random()) * self._noise, index


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(10)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(torch.tanh(self.first(rows)), 0.3, self.training))


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def make(mode: str, size: int = 29, batch: int = 4, accumulation: int = 1, **options: Any):
    set_seed(7)
    kwargs: dict[str, Any] = {}
    kept_workers = options.pop("kept_workers", False)
    if mode == "fsdp2":
        kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
        )
        # accelerate turns FSDP on for GPUs only, and trains without it on CPUs, silently.
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    loading = DataLoaderConfiguration(use_seedable_sampler=options.pop("seedable", True), **options.pop("loading", {}))
    accelerator = Accelerator(
        cpu=True, dataloader_config=loading, gradient_accumulation_steps=accumulation, **kwargs, **options
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if kept_workers else {}
    loader = DataLoader(Noisy(size, 0 if kept_workers else 0.01), batch_size=batch, shuffle=True, **workers)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert isinstance(model, FSDPModule) is (mode == "fsdp2")
    return accelerator, model, optimizer, scheduler, loader


def train_step(accelerator, model, optimizer, scheduler, rows) -> torch.Tensor:
    loss = model(rows).pow(2).mean()
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


def log_line(
    loss: torch.Tensor, scheduler: Any, index: torch.Tensor, counter: Counter
) -> tuple[str, str, list[int], int]:
    return float(loss).hex(), float(scheduler.get_last_lr()[0]).hex(), index.tolist(), counter.seen


def train(
    root: str, mode: str, every: int, stop_at: int | None = None, accumulation: int = 1, batch: int = 4, **options: Any
) -> dict[Any, Any]:
    """Train all epochs; at `stop_at` wait to be killed. Return a line for each step, and one for each epoch."""
    accelerator, model, optimizer, scheduler, loader = make(mode, accumulation=accumulation, batch=batch, **options)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    lines: dict[Any, Any] = {}
    with AccelerateCheckpointer(accelerator, root) as ck:
        step = ck.restore() or 0
        for epoch in range(ck.epoch, EPOCHS):
            for rows, index in ck.batches(loader):
                with accelerator.accumulate(model):
                    loss = train_step(accelerator, model, optimizer, scheduler, rows)
                step += 1
                counter.seen += len(index)
                lines[step] = log_line(loss, scheduler, index, counter)
                if step % every == 0:
                    ck.save(step)
                if step == stop_at:
                    ck.finish()
                    wait_to_be_killed(root)
            counter.seen += int(torch.randint(1000, ()))  # what follows an epoch draws numbers too
            lines[f"epoch {epoch}"] = counter.seen
    return lines


def train_with(root: str, mode: str, every: int, stop_at: int | None, options: dict[str, Any]) -> dict[Any, Any]:
    return train(root, mode, every, stop_at, **options)


def refusals(root: str) -> dict[str, str]:
    """Return what each wrong use raises, by name."""
    found = {}
    accelerator, *_, loader = make("single", seedable=False)
    with AccelerateCheckpointer(accelerator, f"{root}/a") as ck:
        found["not seedable"] = outcome(ck.batches, loader)
    accelerator, *_, loader = make("single")
    with AccelerateCheckpointer(accelerator, f"{root}/b") as ck:
        iterable = accelerator.prepare(DataLoader(Endless(), batch_size=2))
        found["iterable"] = outcome(ck.batches, iterable)
        found["not prepared"] = outcome(ck.batches, DataLoader(Noisy(4)))
        ck.save(1).result()
        ck.restore()
        found["position not used"] = outcome(ck.save, 2)
        accelerator.prepare(Net())
        found["prepared late"] = outcome(ck.save, 2)
    empty = Accelerator(cpu=True)
    empty.free_memory()
    with AccelerateCheckpointer(empty, f"{root}/c") as ck:
        found["nothing prepared"] = outcome(ck.restore)
    accelerator, *_ = make("single")
    accelerator.save_state(f"{root}/native")
    attach(accelerator)
    found["weights only"] = outcome(accelerator.save_state, f"{root}/d", False)
    found["native folder"] = outcome(accelerator.load_state, f"{root}/native")
    return found


def train_attached(root: str, folders: bool, stop_at: int | None = None, resume: bool = False) -> dict[Any, Any]:
    """As `train`, through save_state and load_state; `folders` names every folder."""
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=not folders, total_limit=2)
    accelerator, model, optimizer, scheduler, loader = make("single", project_config=project)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    ck = attach(accelerator)
    lines: dict[Any, Any] = {}
    step = 0
    if resume:
        accelerator.load_state(f"{root}/at-12" if folders else None)
        step = 12
    for epoch in range(ck.epoch, EPOCHS):
        for rows, index in ck.batches(loader):
            loss = train_step(accelerator, model, optimizer, scheduler, rows)
            step += 1
            counter.seen += len(index)
            lines[step] = log_line(loss, scheduler, index, counter)
            if step % 4 == 0:
                accelerator.save_state(f"{root}/at-{step}" if folders else None)
            if step == stop_at:
                ck.finish()
                wait_to_be_killed(root)
        counter.seen += int(torch.randint(1000, ()))
        lines[f"epoch {epoch}"] = counter.seen
    ck.close()
    return lines


def wait_to_be_killed(root: str) -> None:
    Path(root, "kill").touch()
    time.sleep(60)


def outcome(function: Callable[..., Any], *arguments: Any) -> str:
    """Return what a call raises, as text; "" if it raises nothing."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001  (the test compares it)
        return f"{type(error).__name__}: {error}"
    return ""
