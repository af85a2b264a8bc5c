"""Foreign checkpoints on an object store: opened by their address, read in ranges, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import holdfast
from holdfast.storage.objects.store import ObjectStorage
from tests.sources.made import save_dcp, torch_file

TENSORS = {"a": torch.arange(600.0).reshape(20, 30), "b": torch.ones(4, dtype=torch.bfloat16)}


def _address(root: str, folder: str) -> str:
    base, _, options = root.partition("?")
    return f"{base}/{folder}?{options}"


@pytest.mark.parametrize("format_name", ["Hugging Face", "torch", "torch DCP"])
def test_a_foreign_folder_is_opened_by_its_address(root: str, tmp_path: Path, format_name: str) -> None:
    files = {"model.safetensors": save(TENSORS)}
    if format_name == "torch":
        files = {"pytorch_model.bin": torch_file(TENSORS)}
    if format_name == "torch DCP":
        folder = save_dcp(tmp_path / "c", {"model": TENSORS})
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
    storage = ObjectStorage(root)
    for name, data in files.items():
        storage._calls.put(f"theirs/{name}", data)
    found: Any = holdfast.open(_address(root, "theirs"))
    assert found.format == format_name and found.keys("model") == ["a", "b"]
    assert torch.equal(torch.from_numpy(found.read("a")), TENSORS["a"])
    live = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    holdfast.load(_address(root, "theirs"), {"model": live})
    for key, tensor in TENSORS.items():
        assert torch.equal(live[key], tensor), key
