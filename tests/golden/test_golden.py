"""Checkpoints of every released format version open, verify and load; newer ones are refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import CURRENT
from tests.golden.make import ABANDONS, METRICS, golden_state

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v*"))


def test_there_are_golden_checkpoints() -> None:
    assert {"v1.0", "v1.1"} <= set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_with_its_true_values(version: str) -> None:
    folder = HERE / version
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
    golden = HERE / "v1.0"
    for path in golden.iterdir():
        if "safetensors" in path.name:
            assert (tmp_path / "now" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_says_the_version_of_its_folder(version: str) -> None:
    fields = strictjson.loads((HERE / version / "holdfast.json").read_bytes(), "manifest")
    assert version == f"v{fields['version'][0]}.{fields['version'][1]}"


def test_the_newest_golden_checkpoint_is_of_the_current_version() -> None:
    assert "v{}.{}".format(*CURRENT) in VERSIONS


def test_what_version_1_1_added_is_read_and_was_not_in_1_0() -> None:
    new, old = holdfast.open(HERE / "v1.1").manifest, holdfast.open(HERE / "v1.0").manifest
    assert (dict(new.metrics), new.abandons) == (METRICS, ABANDONS)
    assert (dict(old.metrics), old.abandons) == ({}, ())


def altered(golden: Path, folder: Path, **changes: object) -> Path:
    """A golden checkpoint with fields of its manifest changed and signed again."""
    shutil.copytree(golden, folder)
    manifest = folder / "holdfast.json"
    fields = strictjson.loads(manifest.read_bytes(), "manifest")
    del fields["digest"]
    fields.update(changes)
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    manifest.write_bytes(strictjson.dumps(fields) + b"\n")
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_a_newer_major_version_is_refused_with_the_way_out(version: str, tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"format version 2\.0.*install a newer version"):
        holdfast.open(altered(HERE / version, tmp_path / "future", version=[2, 0]))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_newer_minor_version_with_fields_nobody_knows_is_read(version: str, tmp_path: Path) -> None:
    folder = altered(HERE / version, tmp_path / "newer", version=[1, 99], surprise={"more": [1, 2]})
    assert holdfast.open(folder).verify().good
    state = golden_state()
    assert holdfast.load(folder, state).step == 42
