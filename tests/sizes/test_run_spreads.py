"""Layouts of a run against the trainer's ranks: the bytes that each holds, with experts and pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.train_cases import LAYOUTS, batches, model, share
from tests.sizes.test_memory_plan import CUT, on_disk

SHAPES: dict[str, dict[str, Any]] = {
    "fsdp-4": {"dp": 4, "zero": 3},
    "replicate-2": {"dp": 2},
    "tp-2": {"tp": 2},
    "pp-2-tp-2": {"pp": 2, "tp": 2},
    "tp-2-dp-2": {"tp": 2, "dp": 2, "zero": 3},
    "pp-2-dp-2": {"pp": 2, "dp": 2, "zero": 3},
    "pp-4": {"pp": 4},
    "tp-2-pp-2-dp-2": {"tp": 2, "pp": 2, "dp": 2, "zero": 3},
    "ep-4": {"dp": 4, "ep": 4, "zero": 3},
    "ep-2-dp-4": {"dp": 4, "ep": 2, "zero": 3},
    "ep-2-replicate-4": {"dp": 4, "ep": 2},
    "ep-2-pp-2": {"pp": 2, "dp": 2, "ep": 2, "zero": 3},
    "ep-2-tp-2": {"tp": 2, "dp": 2, "ep": 2, "zero": 3},
}


def _bytes_of(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def _measure(layout: str, path: str) -> tuple[int, int, int]:
    """Train one step and save; the bytes of parameters, gradients and moments that this rank holds."""
    family = "qwen3_moe" if layout.startswith("ep") else "llama"
    replica = build(model(family), LAYOUTS[layout], seed=0)
    optimizer = replica.make_optimizer(lr=0.01)
    replica.forward_backward(share(replica, batches(4)))
    parameters = list(replica.parameters().values())
    gradients = sum(_bytes_of(parameter.grad) for parameter in parameters)
    optimizer.step()
    holdfast.save(path, replica.state(), step=1, mapping=replica.mapping, **CUT)
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return sum(map(_bytes_of, parameters)), gradients, sum(map(_bytes_of, moments))


@pytest.mark.full
@pytest.mark.parametrize("layout", SHAPES)
def test_ranks_of_the_trainer_hold_what_is_planned(layout: str, tmp_path: Path) -> None:
    measured = run_ranks(LAYOUTS[layout].world, _measure, layout, str(tmp_path / "made"))
    plan = holdfast.plan_memory(tmp_path / "made", optim="adamw", **SHAPES[layout], **CUT)
    assert plan.checkpoint.bytes == on_disk(tmp_path / "made")
    assert [(rank.parameters, rank.gradients, rank.optimizer) for rank in plan.ranks] == measured


def test_stage_2_shards_gradients_too() -> None:
    from tests.dist.layouts import Llama

    one, two = (holdfast.plan_memory(Llama(tied=False), dp=3, zero=zero, optim="adamw") for zero in (1, 2))
    whole = holdfast.plan_memory(Llama(tied=False), optim="adamw").ranks[0]
    assert {rank.gradients for rank in one.ranks} == {whole.gradients}
    assert sum(rank.gradients for rank in two.ranks) == whole.gradients
    assert max(rank.gradients for rank in two.ranks) - min(rank.gradients for rank in two.ranks) <= 4
    for plan in (one, two):
        assert sum(rank.optimizer for rank in plan.ranks) == whole.optimizer
        assert {rank.parameters for rank in plan.ranks} == {whole.parameters}


@pytest.mark.full
def test_the_benchmark_agrees_on_tensors_in_memory(tmp_path: Path) -> None:
    """The same program compares them with the allocator of a GPU. It runs without what a bare machine lacks."""
    bare = tmp_path / "bare.py"
    bare.write_text(
        "import runpy, sys\n"
        "for name in ('ml_dtypes', 'rich', 'click', 'transformers'): sys.modules[name] = None\n"
        "sys.argv[0] = 'size_gpu'\n"
        "runpy.run_module('benchmarks.size_gpu', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, str(bare), "--device", "cpu", "--width", "256", "--layers", "2"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len({row["run"] for row in rows}) >= 7
    assert max(row["off"] for row in rows) < 0.001
