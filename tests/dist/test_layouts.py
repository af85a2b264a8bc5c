"""Same state, same bytes, whatever the layout; and every layout loads every other's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.dist.harness import run_ranks
from tests.dist.layouts import LAYOUTS, local_values, scramble

pytestmark = pytest.mark.sliced(3)

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


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.full), False], ids=["tied", "untied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path]:
    root = tmp_path_factory.mktemp("layouts")
    for layout, (world, _) in LAYOUTS.items():
        run_ranks(world, _save, layout, request.param, str(root / layout))
    return request.param, root


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_bytes_are_those_of_a_single_process(saved: tuple[bool, Path], layout: str) -> None:
    tied, root = saved
    expected = _tensor_bytes(root / "single")
    found = _tensor_bytes(root / layout)
    assert sorted(found) == sorted(expected)
    assert len([name for name in found if name.startswith("model-")]) > 1
    for name, data in expected.items():
        assert found[name] == data, f"{name} differs (tied={tied})"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_checkpoint(saved: tuple[bool, Path], layout: str) -> None:
    tied, root = saved
    done = run_ranks(LAYOUTS[layout][0], _load_all, layout, tied, str(root), list(LAYOUTS))
    assert done == [len(LAYOUTS)] * LAYOUTS[layout][0]


def test_tied_weights_are_stored_once(saved: tuple[bool, Path]) -> None:
    tied, root = saved
    checkpoint = holdfast.open(root / "pipeline-2")
    assert "lm_head.weight" in checkpoint.keys("model")
    assert ("lm_head.weight" in checkpoint.places["model"]) is not tied
    assert checkpoint.verify().good
