"""Plans of holdfast.spmd on their way through a conversion: kept where their keys are, named where they are not."""

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import NotFound
from holdfast.spmd import Plan


def plan(roles: list[str]) -> dict[str, Any]:
    """A plan as `holdfast.spmd.distribute` leaves it on the module that it placed."""
    placed = {role: ["S0"] for role in roles}
    return {
        "version": 1, "mesh": [["tp", 2]], "parameters": placed, "activations": {}, "moved_bytes": 64,
        "held_bytes": 32, "kept_bytes": 0, "why": ["weights are large"],
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state: dict[str, Any] = {"model": torch.nn.Linear(4, 6), "critic": torch.nn.Linear(4, 1)}
    for module in state.values():
        module.holdfast_plan = plan(["weight", "bias"])
    holdfast.save(tmp_path / "a", state, step=3)
    return tmp_path / "a"


def plans(path: Path) -> dict[str, Any]:
    return dict(holdfast.open(path).manifest.plans)


def test_a_copy_keeps_every_plan(saved: Path, tmp_path: Path) -> None:
    assert plans(saved).keys() == {"model", "critic"}
    done = convert(saved, tmp_path / "b", ConvertOptions(dtype="bfloat16"))
    assert plans(tmp_path / "b") == plans(saved) and done.notes == ()
    assert Plan.load(tmp_path / "b") == Plan.load(saved)


def test_a_plan_goes_with_its_module(saved: Path, tmp_path: Path) -> None:
    done = convert(saved, tmp_path / "b", ConvertOptions(only=("critic",)))
    assert plans(tmp_path / "b").keys() == {"critic"} and done.notes == ()


def test_a_mapping_drops_the_plan_of_the_module_that_it_changes_and_says_so(saved: Path, tmp_path: Path) -> None:
    done = convert(saved, tmp_path / "b", ConvertOptions(mapping=MappingOptions(["weight -> kernel"])))
    assert plans(tmp_path / "b").keys() == {"critic"}
    assert done.notes == ("the holdfast.spmd plan of model is omitted: it names keys that the mapping changes",)
    with pytest.raises(NotFound, match="was not placed by a plan"):
        Plan.load(tmp_path / "b")


def test_a_mapping_that_changes_nothing_keeps_the_plan(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "b", ConvertOptions(mapping=MappingOptions(["weight -> weight"])))
    assert plans(tmp_path / "b") == plans(saved)


def test_a_format_without_a_place_for_plans_says_so(saved: Path, tmp_path: Path) -> None:
    done = convert(saved, tmp_path / "b", ConvertOptions(to="hf", only=("model",)))
    assert "the holdfast.spmd plan of model is omitted: the format hf cannot store it" in done.notes
