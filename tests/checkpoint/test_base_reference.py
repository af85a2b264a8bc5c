"""Base models by reference: what is recorded of a folder, and every way in which it may have changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint.base_reference import base_files, base_folder, check_base, find_base, references
from holdfast.format.digest import digest_hex


def folder_of(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def record_of(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"mode": "reference", "source": str(folder), "revision": None, "files": base_files(folder), **fields}


def test_weights_and_config_are_recorded_and_nothing_else(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "base", model_safetensors=b"weights", config_json=b"{}", tokenizer_json=b"{}")
    (folder / "adapter_model.safetensors").write_bytes(b"another adapter")
    assert base_files(folder) == {
        "config.json": [2, digest_hex(b"{}")],
        "model.safetensors": [7, digest_hex(b"weights")],
    }


def test_a_changed_file_is_digested_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "base", model_safetensors=b"weights")
    base_files(folder)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert base_files(folder)["model.safetensors"] == [7, digest_hex(b"WEIGHTS")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_bytes(b"weighty"), "the digest of .*model.safetensors is"),
        (lambda file: file.write_bytes(b"more weights"), "has 12 bytes, 7 were recorded"),
        (lambda file: file.unlink(), "is missing, 7 were recorded"),
    ],
    ids=["content", "size", "missing"],
)
def test_a_changed_base_is_a_mismatch(tmp_path: Path, change: Any, message: str) -> None:
    folder = folder_of(tmp_path / "base", model_safetensors=b"weights")
    record = record_of(folder)
    check_base(record, folder, "here: model")
    change(folder / "model.safetensors")
    os.utime(folder, ns=(1, 1))
    with pytest.raises(holdfast.Mismatch, match=f"here: model: its base model changed: .*{message}"):
        check_base(record, folder, "here: model")


def test_sizes_alone_are_compared_without_digests(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "base", model_safetensors=b"weights")
    record = record_of(folder)
    (folder / "model.safetensors").write_bytes(b"weighty")
    check_base(record, folder, "here", digests=False)
    (folder / "model.safetensors").write_bytes(b"more weights")
    with pytest.raises(holdfast.Mismatch, match="has 12 bytes"):
        check_base(record, folder, "here", digests=False)


def test_files_of_a_hub_cache_are_known_by_their_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--some--model"
    folder_of(home / "blobs")
    (home / "blobs" / "a1b2").write_bytes(b"weights")
    snapshot = folder_of(home / "snapshots" / "c0ffee")
    (snapshot / "model.safetensors").symlink_to("../../blobs/a1b2")
    assert base_folder("some/model", "c0ffee") == snapshot
    assert base_folder("some/model", "beef") is None and base_folder("some/model", None) is None
    assert base_folder("some/model", "../snapshots") is None
    record = record_of(snapshot, source="some/model", revision="c0ffee")
    assert record["files"] == {"model.safetensors": [7, "blob:a1b2"]}
    check_base(record, find_base(record, None, "here"), "here")
    (home / "blobs" / "d3").write_bytes(b"weighty")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/d3")
    with pytest.raises(holdfast.Mismatch, match="blob:d3"):
        check_base(record, snapshot, "here")
    assert list(references({"model": record})) == ["the base model of model, some/model at revision c0ffee"]


def test_a_missing_base_is_not_found(tmp_path: Path) -> None:
    record = record_of(folder_of(tmp_path / "base", model_safetensors=b"weights"))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(holdfast.NotFound, match=r"here: its base model .*/base is missing on this host"):
        find_base(record, None, "here")
    check_base(record, find_base(record, tmp_path / "moved", "here"), "here")  # where the live model came from


def test_a_holdfast_checkpoint_is_known_by_its_manifest(tmp_path: Path) -> None:
    import torch

    holdfast.save(tmp_path / "base", {"model": torch.nn.Linear(2, 2)})
    files = base_files(tmp_path / "base")
    assert files["model-00001-of-00001.safetensors"][1] == "" and len(files["holdfast.json"][1]) == 32
    record = record_of(tmp_path / "base")
    holdfast.save(tmp_path / "base", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(holdfast.Mismatch, match=r"holdfast\.json"):
        check_base(record, tmp_path / "base", "here")
