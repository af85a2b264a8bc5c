"""PEFT adapters over ranks: the same bytes on any mesh, killed in training and resumed bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.adapters.peft_cases import adapted, open_base, optimizer_of, train_step, write_base
from tests.dist.harness import Victims, run_ranks, tell_parent

STEPS, SAVED, KILLED = 6, 3, 4


def build(base: str, way: str, cases: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the model and its optimizer: alone, under DDP or under FSDP2."""
    model = adapted(open_base(Path(base)), *cases)
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, optimizer


def _fill(model: Any, optimizer: Any) -> None:
    """Give adapters and their optimizer values that depend on neither mesh nor training."""
    for number, param in enumerate(own for own in model.parameters() if own.requires_grad):
        with torch.no_grad():
            full = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            values = (
                torch.distributed.tensor.distribute_tensor(full, param.device_mesh, param.placements)
                if hasattr(param, "device_mesh")
                else full
            )
            param.copy_(values)
            optimizer.state[param] = {"step": torch.tensor(2.0), "exp_avg": param.clone(), "exp_avg_sq": param.clone()}


def _save_filled(base: str, path: str, way: str, cases: tuple[str, ...]) -> None:
    model, optimizer = build(base, way, cases)
    _fill(model, optimizer)
    holdfast.save(path, {"model": model, "optimizer": optimizer, "ema": holdfast.EMA(model, 0.9)}, step=1)


@pytest.mark.sliced(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cases", [("lora", "dora"), ("head",), ("rows",)], ids="+".join)
def test_adapters_have_the_same_bytes_on_any_mesh(tmp_path: Path, cases: tuple[str, ...]) -> None:
    base = str(write_base(tmp_path / "base"))
    run_ranks(1, _save_filled, base, str(tmp_path / "one"), "alone", cases)
    for way in ("fsdp", "ddp"):
        run_ranks(2, _save_filled, base, str(tmp_path / way), way, cases)
        files = {str(file.relative_to(tmp_path / "one")) for file in (tmp_path / "one").rglob("*") if file.is_file()}
        assert files == {str(f.relative_to(tmp_path / way)) for f in (tmp_path / way).rglob("*") if f.is_file()}
        assert {"adapter_model.safetensors", "adapter_config.json", "ema/adapter_model.safetensors"} <= files
        for file in files - {"holdfast.json"}:
            assert (tmp_path / "one" / file).read_bytes() == (tmp_path / way / file).read_bytes(), f"{way}: {file}"


def _train(base: str, root: str, way: str, cases: tuple[str, ...], victim: bool) -> list[str]:
    """Train to the end from the newest step; returns the losses by step. A victim waits to be killed."""
    model, optimizer = build(base, way, cases)
    state = {"model": model, "optimizer": optimizer, "ema": holdfast.EMA(model, 0.9)}
    losses = []
    with holdfast.Checkpointer(root) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start, STEPS):
            losses.append(train_step(model, optimizer, step))
            state["ema"].update()
            if step + 1 in (1, SAVED):
                handle = checkpointer.save(step + 1, state)
                if step + 1 == SAVED and victim:
                    handle.result(60)
            if victim and step + 1 == KILLED:
                tell_parent(losses)
                signal.pause()
    return losses


@pytest.mark.sliced(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("way", "cases"),
    [
        ("alone", ("lora", "dora")),
        ("fsdp", ("lora",)),
        *[(way, cases) for way in ("alone", "ddp") for cases in [("lora",), ("dora",), ("head",), ("rows",), ("ia3",)]],
        ("fsdp", ("head",)),
        ("fsdp", ("lora", "dora")),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_killed_and_resumed_training_is_the_uninterrupted_one(tmp_path: Path, way: str, cases: tuple[str, ...]) -> None:
    base, world = str(write_base(tmp_path / "base")), 1 if way == "alone" else 2
    whole = run_ranks(world, _train, base, str(tmp_path / "whole"), way, cases, False)
    victims = Victims(world, _train, base, str(tmp_path / "run"), way, cases, True)
    assert victims.hear() == [losses[:KILLED] for losses in whole]
    victims.kill()
    resumed = run_ranks(world, _train, base, str(tmp_path / "run"), way, cases, False)
    assert resumed == [losses[SAVED:] for losses in whole]
    step = tmp_path / "run" / f"step-{SAVED:012d}"
    assert "adapter_model.safetensors" in os.listdir(step) and not list(step.glob("model-*"))
