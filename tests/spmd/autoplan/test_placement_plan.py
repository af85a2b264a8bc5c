"""A plan goes to JSON and back, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.spmd import Pins, Plan
from holdfast.spmd.autoplan.units import WHOLE
from holdfast.spmd.base.spmd_errors import PlanNotFound, SpmdArgumentError

PLAN = Plan(
    (("dp", 2), ("tp", 4)),
    (("layers.*.up.weight", (WHOLE, 0)), ("norm.weight", (WHOLE, WHOLE))),
    (("layers.*.up", Pins(None, (0, 2))), ("layers.*", Pins((0, 1), (0, 1)))),
    moved_bytes=100,
    held_bytes=2 << 20,
    kept_bytes=7,
    why=("because",),
)


def test_a_plan_is_the_same_after_a_file(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_a_plan_is_printed_for_people() -> None:
    lines = str(PLAN).splitlines()
    assert lines[0] == "plan for dp=2 x tp=4"
    assert any(line.split() == ["layers.*.up.weight", "R", "S0"] for line in lines)
    assert any(line.split() == ["layers.*.up", "as", "it", "comes", "->", "S0", "S2"] for line in lines)
    assert "  because" in lines and "2.0 MiB" in str(PLAN)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"version": 2}, "version"),
    "no mesh": ({"mesh": []}, "mesh"),
    "an axis without a size": ({"mesh": [["tp", True]]}, "mesh"),
    "placed sideways": ({"parameters": {"w": ["R", "X1"]}}, "placed 'X1'"),
    "a placement that is no text": ({"parameters": {"w": ["R", 1]}}, "placed"),
    "a dim of three digits": ({"parameters": {"w": ["R", "S100"]}}, "placed"),
    "too few placements": ({"parameters": {"w": ["R"]}}, "needs 2 placements"),
    "no placements": ({"parameters": {"w": None}}, "no placements"),
    "a list of parameters": ({"parameters": []}, "parameters"),
    "half of the pins": ({"activations": {"w": {"takes": None}}}, "takes and gives"),
    "bytes as text": ({"moved_bytes": "5"}, "moved_bytes"),
    "fewer bytes than none": ({"held_bytes": -1}, "held_bytes"),
    "reasons as text": ({"why": "because"}, "why"),
    "more than a plan says": ({"extra": 1}, "extra"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_plan_is_refused(change: str) -> None:
    fields, said = CHANGES[change]
    with pytest.raises(SpmdArgumentError, match="invalid plan") as caught:
        Plan.from_dict(PLAN.to_dict() | fields)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version":1,"version":1}', "[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SpmdArgumentError, match="invalid plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_plan_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(PlanNotFound, match="no plan found"):
        Plan.load(tmp_path / "nothing.json")
    (tmp_path / "holdfast.json").write_text(json.dumps({"format": "holdfast"}))
    with pytest.raises(PlanNotFound, match="was not placed by a plan"):
        Plan.load(tmp_path)


def test_a_path_in_place_of_a_plan_is_told_how_to_load_it() -> None:
    with pytest.raises(SpmdArgumentError, match=r"Plan\.load"):
        Plan.from_dict("runs/x/plan.json")  # type: ignore[arg-type]
