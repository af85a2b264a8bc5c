"""The keys of damage: found once however many blocks are bad; headers and indexes that do not agree."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.checkpoint import affected_keys
from holdfast.checkpoint.commit import small_file_record
from holdfast.core.limits import BLOCK_BYTES
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.format.safetensors import encode_index
from tests.web.sample_runs import write_step

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of two tensor files with a key each."""
    arrays = {name: np.ones(100, np.float32) for name in ("a", "b")}
    return write_step(tmp_path, 1, {"model": arrays}, max_shard_bytes=500)


def rewrite(step: Path, files: dict[str, bytes], aliases: dict[str, str] | None = None) -> None:
    """Put other files in place of a step's, in its manifest too, as a writer with a fault would."""
    manifest = decode_manifest((step / "holdfast.json").read_bytes(), "")
    records = dict(manifest.files)
    for name, data in files.items():
        (step / name).write_bytes(data)
        records[name] = replace(small_file_record(data, BLOCK_BYTES), header=records[name].header)
        if name == SECOND:
            records[name] = replace(records[name], header=records[FIRST].header)
    groups = {name: replace(group, aliases=aliases or {}) for name, group in manifest.groups.items()}
    (step / "holdfast.json").write_bytes(encode_manifest(replace(manifest, files=records, groups=groups)))


def problems(step: Path) -> list[str]:
    return [damage.problem for damage in holdfast.open(step).verify().damage]


def test_an_index_that_says_otherwise_is_damage(step: Path) -> None:
    index = "model.safetensors.index.json"
    right = {"a": FIRST, "b": SECOND}
    assert problems(step) == []
    for wrong in (right | {"a": SECOND}, {"a": FIRST}, right | {"c": FIRST}):
        rewrite(step, {index: encode_index(wrong, 800)})
        assert problems(step) == ["the index does not agree with the headers"], wrong
    rewrite(step, {index: encode_index(right, 800)})
    assert problems(step) == []


def test_a_key_in_two_files_is_damage(step: Path) -> None:
    rewrite(step, {SECOND: (step / FIRST).read_bytes()})
    (problem,) = problems(step)
    assert "model has 'a' in two files" in problem


def test_a_tied_key_without_its_tensor_is_damage(step: Path) -> None:
    rewrite(step, {}, aliases={"head": "a"})
    assert problems(step) == []
    rewrite(step, {}, aliases={"head": "none"})
    (problem,) = problems(step)
    assert "ties 'head' to 'none', which is missing" in problem


def test_a_header_in_an_unusual_form_is_read_entry_by_entry(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray((step / FIRST).read_bytes())
    data[-1] ^= 1
    (step / FIRST).write_bytes(data)
    usual = holdfast.open(step).verify().damage
    monkeypatch.setattr(affected_keys, "scan_header", lambda data, size: None)
    assert holdfast.open(step).verify().damage == usual
    assert usual[0].keys == ("a",)


def test_the_keys_of_many_bad_blocks_take_the_memory_of_one_list(tmp_path: Path) -> None:
    """Every block of a file with a damaged header holds, for all that is known, every key of the file."""
    arrays = {f"layers.{number}.{'long' * 30}": np.full(16, number, np.float32) for number in range(2000)}
    holdfast.save(tmp_path / "x", {"model": arrays}, block_bytes=4096)
    file = next((tmp_path / "x").glob("model-*.safetensors"))
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()[:9]) + bytes(file.stat().st_size - 9))
    checkpoint = holdfast.open(tmp_path / "x")
    blocks = len(checkpoint.manifest.files[file.name].blocks)
    affected = affected_keys.AffectedKeys(checkpoint)
    tracemalloc.start()
    try:
        found = [affected.of_block(file.name, 4096 * number, 4096) for number in range(blocks)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert blocks > 50
    assert set(map(len, found)) == {2000}
    assert peak < 8_000_000, f"{peak} bytes for {blocks} blocks"


def test_a_block_has_the_keys_that_it_overlaps(tmp_path: Path) -> None:
    arrays = {name: np.ones(100, np.float32) for name in ("a", "b")}
    checkpoint = holdfast.open(write_step(tmp_path, 1, {"model": arrays}))
    (name,) = checkpoint.manifest.groups["model"].files
    header = checkpoint.manifest.files[name].header
    assert header is not None
    affected = affected_keys.AffectedKeys(checkpoint)
    for offset, size, keys in (
        (0, header.size, ()),
        (header.size - 1, 2, ("a",)),
        (header.size, 400, ("a",)),
        (header.size + 399, 2, ("a", "b")),
        (header.size + 400, 400, ("b",)),
    ):
        assert affected.of_block(name, offset, size) == keys, (offset, size)
