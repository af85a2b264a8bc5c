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
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from holdfast.integrations.lightning import HoldfastCheckpoint

EPOCHS = 3
_SHARED = torch.Generator().manual_seed(3)  # of training and validation loaders


class Noisy(Dataset):
    """Samples that are made noisy when fetched: the random numbers of the main process count too."""

    def __init__(self, size: int, noise: float = 0.01) -> None:
        self._rows = torch.arange(size * 6, dtype=torch.float32).reshape(size, 6) / (6 * size)
        self._noise = noise

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._rows[index] + (torch.randn(6) + random.random()) * self._noise, index


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
            float(loss).hex(),
            float(rate).hex(),
            index.tolist(),
            self.current_epoch,
            batch_idx,
            self.after.hex(),
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

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> int:
        return 0

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


class Gan(Module):
    """Two optimizers, stepped by hand."""

    def __init__(self, plateau: str = "") -> None:
        super().__init__(plateau)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, index = batch
        losses = []
        for optimizer in self.optimizers():
            loss = self.net(rows).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()).hex())
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        self.lines[self.trainer.fit_loop.total_batch_idx] = (losses, index.tolist(), self.current_epoch, batch_idx)

    def configure_optimizers(self) -> Any:
        first, second = self.net[0].parameters(), self.net[3].parameters()
        return [torch.optim.AdamW(first, lr=0.05), torch.optim.SGD(second, lr=0.05, momentum=0.9)], []


def make_loader(kind: str, size: int, batch: int, workers: int) -> Any:
    data = Noisy(size)
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, batch_size=batch, shuffle=True)
    if kind == "generator":
        return DataLoader(data, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "shared":
        return DataLoader(data, batch_size=batch, shuffle=True, generator=_SHARED)
    if kind == "weighted":
        return DataLoader(data, batch_size=batch, sampler=WeightedRandomSampler([1.0] * size, size))
    if kind == "kept":
        return DataLoader(Noisy(size, 0), batch_size=batch, shuffle=True, num_workers=2, persistent_workers=True)
    return DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers)


def make_trainer(ck: Any, lines: dict[Any, Any], mode: str = "single", **options: Any) -> Any:
    strategy: Any = {"single": "auto", "ddp": "ddp", "fsdp2": None}[mode]
    devices = 1 if mode == "single" else 2
    if mode == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    options = {"strategy": strategy, "max_epochs": EPOCHS, "callbacks": [ck]} | options
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        logger=Lines(lines),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=ck.root,
        **options,
    )


def train(root: str, mode: str, stop_at: int | None, trainer_options: dict[str, Any], options: dict[str, Any]):
    """Fit from the last checkpoint; return a line for each batch and each logged value."""
    warnings.filterwarnings(
        "ignore", ".*(num_workers|sync_dist|logging interval|srun|does not have many|goes on amid).*"
    )
    given = dict(trainer_options)
    plateau, kind, workers = given.pop("plateau", ""), given.pop("loader", "plain"), given.pop("workers", 0)
    batch, val = given.pop("batch", 4), given.pop("val", "")
    pl.seed_everything(7)
    module = (Gan if given.pop("module", "") == "gan" else Module)(plateau)
    ck = HoldfastCheckpoint(root, **options)
    callbacks = [ck, *([] if stop_at is None else [Stop(stop_at, root)])]
    trainer = make_trainer(ck, module.lines, mode, callbacks=callbacks, **given)
    loaders = make_loader(kind, 29, batch, workers), make_loader(val, 6, 2, 0) if val else DataLoader(Noisy(6), 2)
    trainer.fit(module, *loaders, ckpt_path="last")
    module.lines["best"] = (Path(ck.best_model_path).name, sorted(Path(name).name for name in ck.best_k_models))
    return module.lines


def evaluate(root: str) -> dict[str, Any]:
    """Fit, then test the best and the last weights, and go on from the best."""

    class Tested(Module):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.weights = self.net[0].weight.detach().clone()

    pl.seed_everything(7)
    weights: dict[str, list[Any]] = {}

    class Keep(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            weights[f"step-{trainer.global_step:012d}"] = module.net[0].weight.tolist()

    ck = HoldfastCheckpoint(root, monitor="val_loss", mode="max", every_n_epochs=1)  # the first epoch is the worst
    trainer = make_trainer(ck, {}, callbacks=[ck, Keep()])
    data, val = make_loader("plain", 29, 4, 0), DataLoader(Noisy(6), batch_size=2)
    trainer.fit(Tested(), data, val, ckpt_path="last")
    best = Path(ck.best_model_path).name
    found: dict[str, Any] = {"best": weights[best], "last": weights["step-000000000024"], "best step": int(best[5:])}
    for name, where in (("tested", "best"), ("tested last", "last")):
        module = Tested()
        trainer.test(module, val, ckpt_path=where)
        found[name] = module.weights.tolist()
    again = Tested()
    trainer = make_trainer(HoldfastCheckpoint(root, every_n_epochs=1), again.lines)
    trainer.fit(again, data, val, ckpt_path=f"{root}/{best}")
    found["refit"] = min(batch for batch in again.lines if isinstance(batch, int)) + 1
    return found


def refusals(root: str) -> dict[str, str]:
    """Return what each wrong use raises, by name."""
    from lightning.pytorch.strategies import FSDPStrategy

    class Hooked(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["net.0.weight"]

    class Endless(IterableDataset):
        def __iter__(self):
            rows = Noisy(29)
            yield from (rows[at] for at in range(29))

    def fit(name: str, module: Any = None, data: Any = None, second: bool = False, **options: Any) -> None:
        ck = HoldfastCheckpoint(f"{root}/{name}", every_n_train_steps=2, **options)
        callbacks = [ck, HoldfastCheckpoint(f"{root}/{name}-2")] if second else [ck]
        trainer = make_trainer(ck, {}, max_epochs=1, callbacks=callbacks)
        trainer.fit(module or Module(), data or make_loader("plain", 29, 4, 0), DataLoader(Noisy(6), batch_size=2))

    def strategy() -> None:
        from holdfast.integrations.lightning.run_record import require_strategy

        require_strategy(FSDPStrategy())

    def outcome(function: Any) -> str:
        try:
            function()
        except Exception as error:  # noqa: BLE001  (the test compares it)
            return f"{type(error).__name__}: {error}"
        return ""

    return {
        "two": outcome(lambda: fit("two", second=True)),
        "fsdp1": outcome(strategy),
        "exception": outcome(lambda: HoldfastCheckpoint(root, save_on_exception=True)),
        "hook": outcome(lambda: fit("hook", Hooked())),
        "iterable": outcome(lambda: fit("iterable", data=DataLoader(Endless(), batch_size=4))),
        "outside": outcome(lambda: fit("outside", model=lambda module: module.net[0])),
    }


def other_package(root: str) -> tuple[list[int], list[int]]:
    """Fit twice with pytorch_lightning; return the batches of each run."""
    import pytorch_lightning

    from holdfast.integrations.pytorch_lightning import HoldfastCheckpoint as Checkpoint

    class Plain(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 1)
            self.batches: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.batches.append(batch_idx)
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = []
    for steps in (3, 5):
        module, ck = Plain(), Checkpoint(root, every_n_train_steps=1)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            callbacks=[ck],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Noisy(29), batch_size=4, shuffle=True), ckpt_path="last")
        found.append(module.batches)
    return found[0], found[1]
