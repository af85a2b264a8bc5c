import json

import pytest
import safetensors.torch
import torch

from tests.cli.calls import call, process


@pytest.fixture
def files(tmp_path):
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
    safetensors.torch.save_file(tensors, tmp_path / "one.safetensors")
    torch.save(tensors, tmp_path / "two.pt")
    torch.save({"model": tensors | {"a.bias": torch.zeros(2)}, "epoch": 3}, tmp_path / "three.pt")
    return tmp_path


@pytest.mark.parametrize("name", ["one.safetensors", "two.pt", "three.pt"])
def test_a_single_file_is_shown(files, name):
    shown = json.loads(call("show", files / name, "--json").output)
    assert shown["path"] == str(files / name)
    assert shown["groups"]["model"]["tensors"]["a.weight"]["shape"] == [2, 3]
    assert "float32[2, 3]" in call("show", files / name).output
    assert json.loads(call("show", files / name, "a.weight", "--json").output)["max_abs"] == 5.0


def test_single_files_are_compared(files):
    assert call("diff", files / "one.safetensors", files / "two.pt").exit_code == 0
    done = call("diff", files / "two.pt", files / "three.pt", "--json")
    assert done.exit_code == 1 and "a.bias" in {found["key"] for found in json.loads(done.output)["differences"]}


@pytest.mark.parametrize("name", ["one.safetensors", "two.pt"])
def test_a_single_file_has_no_digests_to_verify(files, name):
    done = process("verify", files / name)
    assert done.returncode == 2
    kind = "Hugging Face" if name.endswith("safetensors") else "torch"
    assert done.stderr.startswith(f"holdfast: {files / name}: a checkpoint in the format {kind} has no digests to ver")


def test_a_file_that_is_no_checkpoint_is_said_to_be_none(files):
    (files / "notes.txt").write_text("nothing")
    for command in ("show", "verify"):
        done = process(command, files / "notes.txt")
        assert done.returncode == 2 and "not a tensor file that Holdfast can read" in done.stderr
