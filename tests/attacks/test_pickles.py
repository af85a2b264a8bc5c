"""No pickle is ever loaded, wherever it is put."""

import base64
import json
import pickle
from pathlib import Path

import pytest
import torch

import holdfast
from attacks.forge import MODEL, examine, forge_file
from holdfast.core.errors import Damaged, NotFound


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def proof(tmp_path):
    return tmp_path / "the pickle was loaded"


@pytest.fixture
def smuggled(proof):
    return pickle.dumps(Touch(proof))


def test_the_pickle_does_what_it_says(smuggled, proof):
    pickle.loads(smuggled)
    assert proof.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_a_folder_of_pickles_is_no_checkpoint(foreign, smuggled, proof, name):
    (foreign / name).write_bytes(smuggled)
    with pytest.raises(NotFound, match="not a checkpoint"):
        examine(foreign)
    assert not proof.exists()


def test_a_pickle_named_safetensors_is_damage(foreign, smuggled, proof):
    (foreign / "model.safetensors").write_bytes(smuggled)
    with pytest.raises(Damaged):
        examine(foreign)
    assert not proof.exists()


def test_a_torch_file_named_safetensors_is_damage(foreign, proof):
    torch.save({"a": torch.ones(2), "b": Touch(proof)}, foreign / "model.safetensors")
    with pytest.raises(Damaged):
        examine(foreign)
    assert not proof.exists()


@pytest.mark.parametrize("name", [MODEL, "state.json"])
def test_a_pickle_in_place_of_a_file_is_damage(checkpoint, smuggled, proof, name):
    forge_file(checkpoint, name, smuggled)
    with pytest.raises(Damaged):
        examine(checkpoint)
    assert not proof.exists()


@pytest.mark.parametrize("tag", ["$bytes", "$pickle", "$object"])
def test_a_pickle_in_state_json_stays_bytes(checkpoint, smuggled, proof, tag):
    content = {tag: base64.b64encode(smuggled).decode()}
    entries = {"note": {"kind": "json", "value": content}}
    forge_file(checkpoint, "state.json", json.dumps({"version": 1, "entries": entries}).encode())
    value = holdfast.open(checkpoint).value("note")
    assert value == (smuggled if tag == "$bytes" else content)
    assert not proof.exists()


def test_an_object_dtype_in_state_json_is_damage(checkpoint):
    entries = {"note": {"kind": "json", "value": {"$numpy": ["object", "00" * 8]}}}
    forge_file(checkpoint, "state.json", json.dumps({"version": 1, "entries": entries}).encode())
    with pytest.raises(Damaged, match=r"a bad \$numpy value"):
        examine(checkpoint)
