"""Checkpoints of every released format version open, verify and load; newer ones are refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from golden.make import golden_state
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex

VERSIONS = sorted(path.name for path in Path(__file__).parent.glob("v*"))


def test_there_are_golden_checkpoints() -> None:
    assert "v1.0" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_with_its_true_values(version: str) -> None:
    folder = Path(__file__).parent / version
    assert holdfast.open(folder).verify().good
    truth, state = golden_state(), golden_state()
    with torch.no_grad():
        for tensor in [*state["model"].state_dict().values(), *state["odd"].values()]:
            tensor.zero_()
    state["optimizer"].state.clear()
    state["note"] = None
    report = holdfast.load(folder, state)
    assert report.step == 42
    for key, value in truth["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[key], value), key
    for parameter, other in zip(state["model"].parameters(), truth["model"].parameters(), strict=True):
        for name, value in truth["optimizer"].state[other].items():
            assert torch.equal(state["optimizer"].state[parameter][name], value)
    assert all(torch.equal(state["odd"][key], value) for key, value in truth["odd"].items())
    assert math.isnan(state["note"].pop("nan")) and state["note"] == {"tuple": (1, b"x"), "keys": {1: "one"}}


def test_the_bytes_are_still_the_golden_ones(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "now", golden_state(), step=42)
    golden = Path(__file__).parent / "v1.0"
    for path in golden.iterdir():
        if "safetensors" in path.name:
            assert (tmp_path / "now" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_newer_major_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "v1.0", tmp_path / "future")
    manifest = tmp_path / "future" / "holdfast.json"
    fields = strictjson.loads(manifest.read_bytes(), "manifest")
    del fields["digest"]
    fields["version"] = [2, 0]
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    manifest.write_bytes(strictjson.dumps(fields) + b"\n")
    with pytest.raises(holdfast.Unsupported, match=r"format version 2\.0.*install a newer one"):
        holdfast.open(tmp_path / "future")
