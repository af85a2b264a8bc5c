"""A small Ray Train run on the CPU: in local mode on the ranks of a launcher, and in a cluster on this machine."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import holdfast
from holdfast.integrations.ray import RayCheckpointer, address

STEPS, INTERVAL = 12, 3


def make_state() -> dict[str, Any]:
    """Return a model with dropout, its optimizer and scheduler, and the streams that the data is drawn from."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(ray.train.get_context().get_world_rank())
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": holdfast.RandomStreams()}


def digest(model: torch.nn.Module) -> int:
    """Return a checksum of the parameters, the same whatever wraps the model."""
    inner = getattr(model, "module", model)
    return zlib.crc32(b"".join(parameter.detach().numpy().tobytes() for parameter in inner.parameters()))


def train_step(state: dict[str, Any]) -> dict[str, str]:
    """Train one step on random data; return its numbers exactly."""
    batch = torch.randn(4, 8)
    loss = state["model"](batch).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    rate = state["scheduler"].get_last_lr()[0]
    state["optimizer"].step()
    state["scheduler"].step()
    return {
        "batch": batch.sum().item().hex(),
        "loss": loss.item().hex(),
        "norm": norm.item().hex(),
        "lr": float(rate).hex(),
    }


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Train up to a step; log each step, and what Ray knows after each save. Kills its worker where told to."""
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    out = Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)
    state = make_state()
    with RayCheckpointer(config.get("root"), keep=config.get("keep")) as ck:
        start = ck.restore(state, begin_from=config.get("begin_from")) or 0
        begun = digest(state["model"])
        with (out / f"log-{rank}.jsonl").open("a") as log:
            log.write(json.dumps({"started": start, "begun": begun}) + "\n")
            for step in range(start + 1, config.get("steps", STEPS) + 1):
                numbers = train_step(state)
                log.write(json.dumps({"step": step, **numbers}) + "\n")
                log.flush()
                if step % INTERVAL == 0:
                    ck.save_and_report({"loss": float.fromhex(numbers["loss"]), "run": "a"}, step, state)
                    log.write(json.dumps({"saved": step, "known": _known()}) + "\n")
                    log.flush()
                _stop_if_told(config, rank, step, ck)
    return {"start": start, "begun": begun, "digest": digest(state["model"]), "world": dist.get_world_size()}


def _known() -> int | None:
    """Return the step that Ray knows, opened and verified: it must be committed."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    opened = holdfast.open(address(checkpoint))
    assert opened.verify().good
    return opened.step


def _stop_if_told(config: dict[str, Any], rank: int, step: int, ck: RayCheckpointer) -> None:
    """Die once at each (rank, step) of `kills`, amid a save where the step is saved; wait to be killed at `stop_at`."""
    for number, kill in enumerate(config.get("kills", ())):
        marker = Path(config["out"]) / f"killed-{number}"
        if kill == (rank, step) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if config.get("stop_at") == step:
        ck.checkpointer.finish()
        dist.barrier()
        Path(config["kill_file"]).touch()
        signal.pause()


def fit_locally(config: dict[str, Any]) -> dict[str, Any]:
    """Run the train loop in Ray's local mode: on this rank of torchrun, without a cluster."""
    result = TorchTrainer(train_loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0)).fit()
    return {
        "checkpoint": None if result.checkpoint is None else address(result.checkpoint),
        "metrics": result.metrics,
        "returned": result.return_value,
    }


def call_locally(loop: Any, config: dict[str, Any]) -> Any:
    """Return what a train loop returns in local mode."""
    trainer = TorchTrainer(loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0))
    return trainer.fit().return_value


class Cluster:
    """A cluster of Ray on this machine with two CPUs, and its runs under a folder. Use as a context manager."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> Cluster:
        self._temporary = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a short path: sockets are in it
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_AUTH_MODE"] = "disabled"  # it would put a token into the home folder
        ray.init(
            num_cpus=2,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=str(self._temporary),
        )
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        end = time.monotonic() + 30  # processes of Ray that are about to end still write there
        while self._temporary.exists() and time.monotonic() < end:
            shutil.rmtree(self._temporary, ignore_errors=True)
            time.sleep(0.5)

    def fit(self, name: str, config: dict[str, Any], *, workers: int = 2, keeps: int | None = None) -> dict[str, Any]:
        """Run the train loop as a run of this name; return the result, and what the folders of the run hold."""
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"out": str(self.folder / f"{name}-log"), **config},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                name=name,
                storage_path=str(self.folder),
                failure_config=FailureConfig(max_failures=len(config.get("kills", ()))),
                checkpoint_config=CheckpointConfig(num_to_keep=keeps),
            ),
        )
        result = trainer.fit()
        assert result.checkpoint is not None and result.best_checkpoints is not None
        return {
            "path": result.checkpoint.path,
            "checkpoint": result.checkpoint,
            "metrics": result.metrics,
            "returned": result.return_value,
            "reported": [(Path(found.path).name, metrics) for found, metrics in result.best_checkpoints],
        }


def fit_all(folder: str) -> dict[str, Any]:
    """Run everything that needs a cluster, one after the other, and return the results by name."""
    keep = holdfast.keep.last(2)
    with Cluster(Path(folder)) as cluster:
        found = {"killed": cluster.fit("killed", {"keep": keep, "kills": [(1, 6), (0, 11)]})}
        begin = found["killed"]["checkpoint"]
        found["again"] = cluster.fit("killed", {"keep": keep, "steps": 15})
        found["one"] = cluster.fit("one", {"begin_from": begin, "steps": 18}, workers=1, keeps=1)
    for run in found.values():
        del run["checkpoint"]  # it is of Ray's classes
    return found
