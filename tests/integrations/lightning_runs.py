"""Lightning runs that the tests stop and resume: every step logs its loss and its samples."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast.integrations.lightning import HoldfastCheckpoint

EPOCHS = 3


class Noisy(Dataset):
    """Samples that are made noisy when fetched: the random numbers of the main process count too."""

    def __init__(self, size: int) -> None:
        self._rows = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / (6 * size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._rows[index] + torch.randn(6) * 0.01 + random.random() * 0.01, index


class Module(pl.LightningModule):
    def __init__(self, plateau: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.lines: dict[Any, Any] = {}
        self.after = 0.0  # what hooks after a batch and an epoch drew

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, index = batch
        loss = self.net(rows).pow(2).mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("running", self.mean, on_step=False, on_epoch=True)
        rate = self.optimizers().param_groups[0]["lr"]
        self.lines[self.trainer.fit_loop.total_batch_idx] = (
            float(loss).hex(), float(rate).hex(), index.tolist(), self.current_epoch, batch_idx, self.after.hex(),
        )
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.after += float(torch.rand(()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["after"] = self.after

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.after = checkpoint["after"]

    def on_train_epoch_end(self) -> None:
        self.after += float(torch.rand(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        kind = self.hparams["plateau"]
        if kind:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", "interval": kind, "strict": False}]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]


class Lines(Logger):
    """Keeps what Lightning logs."""

    def __init__(self, lines: dict[Any, Any]) -> None:
        self.lines = lines
        self.name, self.version = "lines", 0  # type: ignore[misc]

    name = version = experiment = None  # type: ignore[assignment]

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.lines[f"{name} at {step}"] = float(value).hex()


class Stop(Callback):
    """Waits to be killed at the begin of a batch, once the save before it is durable."""

    def __init__(self, at: int, root: str) -> None:
        self.at, self.root = at, root

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.at:
            trainer.checkpoint_callback.checkpointer.finish()
            Path(self.root, "kill").touch()
            time.sleep(60)


def train(root: str, mode: str, stop_at: int | None = None, trainer_options: dict | None = None, **options: Any):
    """Fit from the last checkpoint; return a line for each batch and each logged value."""
    warnings.filterwarnings("ignore", ".*(num_workers|sync_dist|logging interval|srun|does not have many).*")
    given = dict(trainer_options or {})
    size, batch, plateau = given.pop("size", 29), given.pop("batch", 4), given.pop("plateau", "")
    workers, max_epochs = given.pop("workers", 0), given.pop("max_epochs", EPOCHS)
    pl.seed_everything(7)
    module = Module(plateau)
    loader = DataLoader(Noisy(size), batch_size=batch, shuffle=True, num_workers=workers)
    val = DataLoader(Noisy(6), batch_size=2)
    strategy: Any = {"single": "auto", "ddp": "ddp", "fsdp2": None}[mode]
    devices = 1 if mode == "single" else 2
    if mode == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    ck = HoldfastCheckpoint(root, **options)
    callbacks = [ck, *([] if stop_at is None else [Stop(stop_at, root)])]
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=max_epochs, callbacks=callbacks,
        logger=Lines(module.lines), log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=root, **given,
    )
    trainer.fit(module, loader, val, ckpt_path="last")
    module.lines["best"] = (Path(ck.best_model_path).name, sorted(Path(name).name for name in ck.best_k_models))
    return module.lines
