"""Folders of safetensors as Hugging Face and others lay them out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.core.errors import Damaged, NotFound
from holdfast.sources import open_stored

A, B = {"a": torch.arange(6.0).reshape(2, 3)}, {"b": torch.ones(4, dtype=torch.bfloat16)}


def same(found, tensors=None) -> None:
    tensors = A | B if tensors is None else tensors
    assert found.format == "Hugging Face" and set(found.keys("model")) == set(tensors)
    for key, tensor in tensors.items():
        assert np.array_equal(found.read(key).astype(np.float32), tensor.float().numpy())


@pytest.mark.parametrize("name", ["model", "adapter_model", "diffusion_pytorch_model", "anything", "model.fp16"])
def test_one_file_of_any_name(tmp_path, name):
    save_file(A | B, tmp_path / f"{name}.safetensors")
    same(open_stored(tmp_path))
    same(open_stored(tmp_path / f"{name}.safetensors"))
    same(holdfast.open(tmp_path))


@pytest.mark.parametrize(
    "index", ["", "model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"]
)
def test_several_files_with_or_without_an_index(tmp_path, index):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, (A, B), strict=True):
        save_file(part, tmp_path / name)
    if index:
        (tmp_path / f"{index}.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": names[0], "b": names[1]}})
        )
    same(open_stored(tmp_path))
    (tmp_path / names[1]).unlink()
    with pytest.raises(Damaged, match="which is missing" if index else "found 1 files of 'model'"):
        open_stored(tmp_path)


def test_an_index_that_names_a_key_its_file_lacks_is_damage(tmp_path):
    save_file(A, tmp_path / "part.safetensors")
    weight_map = {"a": "part.safetensors", "gone": "part.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Damaged, match=r"index\.json: the index lists 'gone' in part\.safetensors"):
        open_stored(tmp_path)


def test_two_models_in_one_folder_are_not_mixed(tmp_path):
    for name in ("one", "two"):
        save_file(A, tmp_path / f"{name}.safetensors")
    with pytest.raises(Damaged, match="open one of the files"):
        open_stored(tmp_path)
    same(open_stored(tmp_path / "one.safetensors"), A)


def snapshot(tmp_path: Path) -> tuple[Path, str]:
    digest = "0123456789abcdef" * 4
    (tmp_path / "blobs").mkdir()
    save_file(A, tmp_path / "blobs" / digest)
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    return folder, digest


def test_a_snapshot_of_the_cache_is_read_through_its_links(tmp_path):
    folder, _ = snapshot(tmp_path)
    (tmp_path / "blobs" / ("f" * 40)).write_text('{"model_type": "llama"}')
    (folder / "config.json").symlink_to("../../blobs/" + "f" * 40)
    found: Any = open_stored(folder)
    same(found, A)
    assert found.config() == {"model_type": "llama"} and found.side_files() == ["config.json"]
    same(open_stored(folder / "model.safetensors"), A)
    live = {"a": torch.zeros(2, 3)}
    holdfast.load(folder, {"model": live})
    assert torch.equal(live["a"], A["a"])


@pytest.mark.parametrize("target", ["../../other/{}", "../blobs/{}", "../../blobs/../blobs/{}", "/tmp/blobs/{}"])
def test_other_links_are_not_followed(tmp_path, target):
    folder, digest = snapshot(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target.format(digest))
    with pytest.raises(holdfast.HoldfastError):
        open_stored(folder)


def test_a_blob_that_is_a_link_is_not_followed(tmp_path):
    folder, digest = snapshot(tmp_path)
    (tmp_path / "blobs" / digest).rename(tmp_path / "secret")
    (tmp_path / "blobs" / digest).symlink_to("../secret")
    with pytest.raises(holdfast.HoldfastError):
        open_stored(folder)


def test_tensors_that_are_not_aligned_are_read_whole(tmp_path):
    """Another writer may put bytes before floats: a load must not cut an element in two."""
    big = np.arange(3_000_000, dtype=np.float32)
    header = {
        "byte": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "big": {"dtype": "F32", "shape": [3_000_000], "data_offsets": [3, 12_000_003]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"abc" + big.tobytes())
    live = {"byte": torch.zeros(3, dtype=torch.uint8), "big": torch.zeros(3_000_000)}
    holdfast.load(tmp_path, {"model": live})
    assert bytes(live["byte"].tolist()) == b"abc" and np.array_equal(live["big"].numpy(), big)


def test_small_files_beside_the_weights_are_told(tmp_path):
    save_file(A, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "x.bin"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    found: Any = open_stored(tmp_path)
    assert found.side_files() == [
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert found.read_side_file("config.json") == b"{}"
    with pytest.raises(NotFound):
        found.read_side_file("x.bin")


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(NotFound, match="not a checkpoint"):
        open_stored(tmp_path)
    with pytest.raises(NotFound, match="no such checkpoint"):
        open_stored(tmp_path / "nothing")
