"""Manifests and values that are signed well and say odd things."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.format.digest import digest_hex
from tests.attacks.forge import examine, forge_file, forge_manifest
from tests.cli.calls import call


@pytest.fixture
def step(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "c", {"model": torch.nn.Linear(4, 3), "note": {"epoch": 1}})
    return tmp_path / "c"


GROUPS: list[dict[str, Any]] = [
    {"aliases": {"x": ["q"]}},
    {"aliases": {"x": 5}},
    {"aliases": {"x": "nope"}},
    {"aliases": {"x\x1b": "weight"}},
    {"logical_dtypes": {"weight": ["q"]}},
    {"logical_dtypes": {"weight": "zork"}},
    {"files": []},
]


@pytest.mark.parametrize("changes", GROUPS, ids=str)
def test_odd_group_fields_are_damage(step: Path, changes: dict[str, Any]) -> None:
    forge_manifest(step, lambda fields: fields["groups"]["model"].update(changes))
    with pytest.raises(Damaged):
        examine(step)


def test_a_block_offset_that_is_no_number_is_damage(step: Path) -> None:
    forge_manifest(step, lambda fields: fields["files"]["state.json"]["blocks"][0].__setitem__(0, False))
    with pytest.raises(Damaged):
        holdfast.open(step)


@pytest.mark.parametrize("writer", [{"mesh": [1]}, {"first_replica": 5}, {"first_replica": [5]}], ids=str)
def test_odd_writers_are_damage(step: Path, writer: dict[str, Any]) -> None:
    forge_manifest(step, lambda fields: fields["writer"].update(writer))
    with pytest.raises(Damaged):
        holdfast.open(step)


@pytest.mark.parametrize(
    "entry", [5, {}, [], {"kind": "json", "axes": 5}, {"kind": "optimizer", "groups": [3]}], ids=str
)
def test_odd_entries_of_the_state_are_damage(step: Path, entry: Any) -> None:
    forge_file(step, "state.json", json.dumps({"version": 1, "entries": {"note": entry}}).encode())
    with pytest.raises(Damaged):
        holdfast.load(step, {"note": None})


def test_a_deep_state_is_refused(step: Path) -> None:
    text = b'{"version":1,"entries":{"note":{"kind":"json","value":' + b"[" * 700 + b"]" * 700 + b"}}}"
    forge_file(step, "state.json", text)
    with pytest.raises(Damaged, match="nested deeper"):
        holdfast.load(step, {"note": None})


def test_a_symlinked_subfolder_leads_nowhere(step: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.json").write_bytes(b"secret")
    (step / "ema").symlink_to(tmp_path / "outside")
    record = {"size": 6, "blocks": [[0, 6, digest_hex(b"secret")]]}
    forge_manifest(step, lambda fields: fields["files"].update({"ema/x.json": record}))
    with pytest.raises(HoldfastError):
        examine(step)


CONTROL: list[Callable[[Any], Any]] = [
    lambda fields: fields["groups"]["model"].update(kind="\x1b]0;x\x07"),
    lambda fields: fields.update(created="\x1b\x07"),
    lambda fields: fields["writer"].update(world="\x07"),
]


@pytest.mark.parametrize("change", CONTROL)
def test_no_field_speaks_to_the_terminal(step: Path, change: Callable[[Any], Any]) -> None:
    forge_manifest(step, change)
    assert call("show", step).output.replace("\n", "").isprintable()
