"""An open checkpoint: keys, reading, and damage found in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {f"layers.{index}.w": torch.randn(40, 30) for index in (10, 9, 1)}
    state = {"model": tensors, "extra": {"layers.1.w": torch.ones(2), "only": torch.zeros(3)}, "note": (1, "x")}
    holdfast.save(tmp_path / "x", state, block_bytes=4096, max_shard_size=10_000)
    return tmp_path / "x"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(bytes(data))


def test_keys_are_in_natural_order_and_found_by_group(folder: Path) -> None:
    checkpoint = holdfast.open(folder)
    assert checkpoint.keys("model") == ["layers.1.w", "layers.9.w", "layers.10.w"]
    assert checkpoint.groups == ("extra", "model")
    assert checkpoint.read("layers.1.w").shape == (40, 30), "the model is looked at first"
    assert checkpoint.read("layers.1.w", "extra").tolist() == [1.0, 1.0]
    assert checkpoint.value("note") == (1, "x")
    for wrong in (
        lambda: checkpoint.read("nothing"),
        lambda: checkpoint.keys("nobody"),
        lambda: checkpoint.value("no"),
    ):
        with pytest.raises(holdfast.NotFound):
            wrong()


def test_reading_verifies_unless_told_not_to(folder: Path) -> None:
    flip(folder / "model-00001-of-00002.safetensors", -1)
    checkpoint = holdfast.open(folder)
    with pytest.raises(holdfast.Damaged, match=r"layers\.9\.w"):
        checkpoint.read("layers.9.w")
    assert checkpoint.read("layers.9.w", verify=False).shape == (40, 30)
    assert checkpoint.read("layers.10.w").shape == (40, 30), "what is intact still reads"


def test_verify_finds_all_damage_and_the_tensors_it_touches(folder: Path) -> None:
    flip(folder / "model-00001-of-00002.safetensors", -1)
    flip(folder / "model-00001-of-00002.safetensors", 500)
    flip(folder / "state.json", 5)
    (folder / "extra-00001-of-00001.safetensors").unlink()
    report = holdfast.open(folder).verify()
    found = {(damage.file, damage.keys) for damage in report.damage}
    assert not report.good
    assert ("model-00001-of-00002.safetensors", ("layers.1.w",)) in found
    assert ("model-00001-of-00002.safetensors", ("layers.9.w",)) in found
    assert ("extra-00001-of-00001.safetensors", ("layers.1.w", "only")) in found
    assert any(damage.file == "state.json" for damage in report.damage)


def test_every_flipped_bit_of_a_tensor_file_is_found(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    for offset in range(0, len(data), 97):
        spoiled = bytearray(data)
        spoiled[offset] ^= 1 << (offset % 8)
        path.write_bytes(bytes(spoiled))
        assert not holdfast.open(folder).verify().good, offset
    path.write_bytes(data)
    assert holdfast.open(folder).verify().good


def test_files_swapped_between_checkpoints_are_found(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {f"layers.{index}.w": torch.randn(40, 30) for index in (10, 9, 1)}
    holdfast.save(tmp_path / "y", {"model": tensors}, block_bytes=4096, max_shard_size=10_000)
    name = "model-00001-of-00002.safetensors"
    (folder / name).write_bytes((tmp_path / "y" / name).read_bytes())
    assert not holdfast.open(folder).verify().good


def test_a_recorded_file_that_is_gone_is_damage(folder: Path) -> None:
    (folder / "state.json").unlink()
    with pytest.raises(holdfast.Damaged, match="is missing"):
        holdfast.open(folder).value("note")


def test_what_is_intact_is_read_beside_a_damaged_header(folder: Path) -> None:
    expected = {key: holdfast.open(folder).read(key, "model") for key in holdfast.open(folder).keys("model")}
    places = holdfast.open(folder).places["model"]
    hurt = {key for key, place in places.items() if place.file == places["layers.9.w"].file}
    flip(folder / places["layers.9.w"].file, 20)
    assert hurt and hurt != set(expected)
    for key, array in expected.items():
        if key in hurt:
            with pytest.raises(holdfast.Damaged):
                holdfast.open(folder).read(key, "model")
        else:
            assert (holdfast.open(folder).read(key, "model") == array).all()


def test_only_intact_tensors_are_loaded_when_they_are_all_that_is_wanted(folder: Path) -> None:
    checkpoint = holdfast.open(folder)
    weights = checkpoint.read("layers.1.w", "model")
    gone = checkpoint.places["model"]["layers.10.w"].file
    assert gone not in {checkpoint.places["model"][key].file for key in ("layers.1.w", "layers.9.w")}
    (folder / gone).unlink()
    live = {f"layers.{index}.w": torch.zeros(40, 30) for index in (1, 9, 10)}
    holdfast.load(folder, {"model": live}, only=["model/layers.1.w"], strict=False)
    assert (live["layers.1.w"].numpy() == weights).all() and not live["layers.10.w"].any()
    choices: list[dict[str, Any]] = [{}, {"only": ["layers.10.w"]}, {"ignore": ["layers.1.w"]}]
    for options in choices:
        with pytest.raises(holdfast.Damaged):
            holdfast.load(folder, {"model": live}, strict=False, **options)


def test_restore_falls_back_when_a_small_file_is_gone(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(tmp_path / f"step-{step:012}", {"w": {"a": torch.full((3,), float(step))}, "n": step}, step=step)
    (tmp_path / "step-000000000002" / "state.json").unlink()
    live = {"w": {"a": torch.zeros(3)}, "n": 0}
    with holdfast.Checkpointer(tmp_path) as checkpointer, pytest.warns(holdfast.HoldfastWarning, match="is missing"):
        assert checkpointer.restore(live) == 1
    assert live["n"] == 1
