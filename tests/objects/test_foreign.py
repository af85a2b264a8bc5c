"""Foreign checkpoints on an object store: opened by their address, read in ranges, loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import holdfast
from holdfast.storage.objects.store import ObjectStorage
from tests.cli.calls import call
from tests.convert.megatron import write_run
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


def test_the_iterations_of_a_megatron_run_are_listed(root: str, tmp_path: Path) -> None:
    run, storage = write_run(tmp_path / "run", 50, 100), ObjectStorage(root)
    address = _address(root, "megatron")
    for file in (path for path in run.rglob("*") if path.is_file()):
        storage._calls.put(f"megatron/{file.relative_to(run)}", file.read_bytes())
    done = call("ls", address, "--json")
    assert done.exit_code == 0, done.exception
    assert [(found["step"], found["folder"]) for found in json.loads(done.stdout)] == [
        (50, "iter_0000050"), (100, "iter_0000100")
    ]  # fmt: skip
    (run / "latest_checkpointed_iteration.txt").unlink()
    storage._calls.put("megatron/latest_checkpointed_iteration.txt", b"no number")
    assert "neither an iteration nor" in call("ls", address).output
    storage._calls.put("none/notes.txt", b"")
    assert "no checkpoints under" in call("ls", _address(root, "none")).output
