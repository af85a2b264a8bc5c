"""Same state, same bytes, whatever the layout; and every layout loads every other's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.dist.harness import run_ranks
from tests.dist.layouts import LAYOUTS, local_values, scramble

SLICE = 4
pytestmark = pytest.mark.sliced(SLICE)

# Small blocks and files: many blocks, several files, cuts in the middle of tensors.
CUT: dict[str, Any] = {"block_bytes": 4096, "max_shard_size": 30_000}


def _save(layout: str, tied: bool, path: str) -> list[str]:
    held = LAYOUTS[layout][1]("truth", tied)
    checkpoint = holdfast.save(path, held.state, step=7, ties=held.ties, **CUT)
    return checkpoint.keys()


def _load_all(layout: str, tied: bool, root: str, others: list[str]) -> int:
    """Load each checkpoint into a state of other values; compare with the layout's own truth."""
    held = LAYOUTS[layout][1]("truth", tied)
    truth = local_values(held)
    for other in others:
        scramble(held)
        report = holdfast.load(f"{root}/{other}", held.state, ties=held.ties)
        assert (report.missing, report.unexpected, report.mismatched) == ((), (), ()), report
        for name, value in local_values(held).items():
            assert torch.equal(value, truth[name]), f"{layout} from {other}: {name}"
    return len(others)


def _tensor_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if "safetensors" in file.name}


class Saved:
    """The checkpoints of the layouts, each saved when it is first asked for."""

    def __init__(self, root: Path, *, tied: bool, full: bool) -> None:
        self.root = root
        self.tied = tied
        self.layouts = list(LAYOUTS) if full else list(LAYOUTS)[::SLICE]

    def path(self, layout: str) -> Path:
        path = self.root / layout
        if not path.exists():
            run_ranks(LAYOUTS[layout][0], _save, layout, self.tied, str(path))
        return path


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.full), False], ids=["tied", "untied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("layouts"), tied=request.param, full=request.config.getoption("--full"))


@pytest.mark.sliced(99)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_bytes_are_those_of_a_single_process(saved: Saved, layout: str) -> None:
    expected = _tensor_bytes(saved.path("single"))
    found = _tensor_bytes(saved.path(layout))
    assert sorted(found) == sorted(expected)
    assert len([name for name in found if name.startswith("model-")]) > 1
    for name, data in expected.items():
        assert found[name] == data, f"{name} differs (tied={saved.tied})"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_checkpoint(saved: Saved, layout: str) -> None:
    others = saved.layouts
    for other in others:
        saved.path(other)
    done = run_ranks(LAYOUTS[layout][0], _load_all, layout, saved.tied, str(saved.root), others)
    assert done == [len(others)] * LAYOUTS[layout][0]


def test_tied_weights_are_stored_once(saved: Saved) -> None:
    checkpoint = holdfast.open(saved.path("pipeline-2"))
    assert "lm_head.weight" in checkpoint.keys("model")
    assert ("lm_head.weight" in checkpoint.places["model"]) is not saved.tied
    assert checkpoint.verify().good
