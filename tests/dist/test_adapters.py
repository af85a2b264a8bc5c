"""PEFT adapters over ranks: the same bytes on any mesh, killed in training and resumed bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.adapters.peft_cases import adapted, open_base, optimizer_of, quantized, train_step, write_base
from tests.integrations.launcher import Launcher

pytestmark = pytest.mark.slow
STEPS, SAVED, KILLED = 6, 3, 4


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(
        ["torch.distributed.fsdp", "transformers.models.llama", "peft", "holdfast.engine.background_save"]
    ) as made:
        yield made


@contextmanager
def process_group() -> Iterator[None]:
    """Make the group of the ranks; a single process has none."""
    if os.environ["WORLD_SIZE"] == "1":
        yield
        return
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


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
    with process_group():
        model, optimizer = build(base, way, cases)
        _fill(model, optimizer)
        holdfast.save(path, {"model": model, "optimizer": optimizer, "ema": holdfast.EMA(model, 0.9)}, step=1)


@pytest.mark.full
@pytest.mark.parametrize("cases", [("lora", "dora"), ("head",), ("rows",)], ids="+".join)
def test_adapters_have_the_same_bytes_on_any_mesh(tmp_path: Path, launcher: Launcher, cases: tuple[str, ...]) -> None:
    base = str(write_base(tmp_path / "base"))
    launcher.values(1, _save_filled, base, str(tmp_path / "one"), "alone", cases)
    files = {str(file.relative_to(tmp_path / "one")) for file in (tmp_path / "one").rglob("*") if file.is_file()}
    assert {"adapter_model.safetensors", "adapter_config.json", "ema/adapter_model.safetensors"} <= files
    for way in ("fsdp", "ddp"):
        launcher.values(2, _save_filled, base, str(tmp_path / way), way, cases)
        assert files == {str(f.relative_to(tmp_path / way)) for f in (tmp_path / way).rglob("*") if f.is_file()}
        for file in files - {"holdfast.json"}:
            assert (tmp_path / "one" / file).read_bytes() == (tmp_path / way / file).read_bytes(), f"{way}: {file}"


def _train(base: str, root: str, way: str, cases: tuple[str, ...], victim: bool) -> list[str]:
    """Train to the end from the newest step; returns the losses by step. A victim waits to be killed."""
    with process_group():
        model, optimizer = build(base, way, cases)
        average = holdfast.EMA(model, 0.9)
        state = {"model": model, "optimizer": optimizer, "ema": average}
        losses = []
        with holdfast.Checkpointer(root) as checkpointer:
            start = checkpointer.restore(state) or 0
            for step in range(start, STEPS):
                losses.append(train_step(model, optimizer, step))
                average.update()
                if step + 1 in (1, SAVED):
                    checkpointer.save(step + 1, state).result(60)
                if victim and step + 1 == KILLED:
                    Path(f"{root}.{os.environ['RANK']}").write_text(json.dumps(losses))
                    if os.environ["RANK"] == "0":
                        Path(f"{root}.kill").touch()
                    signal.pause()
    return losses


@pytest.mark.sliced(14)
@pytest.mark.parametrize(
    ("way", "cases"),
    [
        ("fsdp", ("lora", "dora")),
        *[(way, cases) for way in ("alone", "ddp") for cases in [("lora",), ("dora",), ("head",), ("rows",), ("ia3",)]],
        ("fsdp", ("lora",)),
        ("fsdp", ("head",)),
        ("alone", ("lora", "dora")),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_killed_and_resumed_training_is_the_uninterrupted_one(
    tmp_path: Path, launcher: Launcher, way: str, cases: tuple[str, ...]
) -> None:
    base, root, world = str(write_base(tmp_path / "base")), str(tmp_path / "run"), 1 if way == "alone" else 2
    whole = launcher.values(world, _train, base, str(tmp_path / "whole"), way, cases, False)
    outcomes = launcher.run(world, _train, base, root, way, cases, True, kill_file=f"{root}.kill", after_s=0.5)
    assert all(outcome.killed for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert json.loads(Path(f"{root}.0").read_text()) == whole[0][:KILLED]
    resumed = launcher.values(world, _train, base, root, way, cases, False)
    assert resumed == [losses[SAVED:] for losses in whole]
    step = Path(root) / f"step-{SAVED:012d}"
    assert "adapter_model.safetensors" in os.listdir(step) and not list(step.glob("model-*"))


def _stage_of_a_quantized_base(base: str, seed: int) -> Any:
    """Return this rank's pipeline stage: the quantized layers, or the head, which is not quantized."""
    model = adapted(quantized(open_base(Path(base)), "nf4"), "head", seed=seed)
    causal = model.base_model.model
    if dist.get_rank() == 0:
        del causal.lm_head
    else:
        del causal.model
    return model


def _load_stages(base: str, path: str) -> list[str]:
    with process_group():
        saved = _stage_of_a_quantized_base(base, 1)
        holdfast.save(path, {"model": saved}, base="reference")
        live = _stage_of_a_quantized_base(base, 2)
        report = holdfast.load(path, {"model": live})
        values = dict(saved.named_parameters())
        differing = [name for name, value in live.named_parameters() if not torch.equal(value, values[name])]
        return [*report.notes, *differing]


def test_a_stage_without_the_quantized_layers_of_its_base_loads(launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = write_base(tmp_path / "base")
    assert launcher.values(2, _load_stages, str(base), str(tmp_path / "x")) == [[], []]
