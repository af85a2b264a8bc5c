"""No pickle is ever loaded, wherever it is put."""

import base64
import json
import pickle

import pytest
import torch

import holdfast
from holdfast.core.errors import Damaged
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.forge import examine, forge_file
from tests.attacks.pickles import ATTACKS, PROOF, Touch, smuggled


@pytest.fixture
def proof(tmp_path):
    return tmp_path / PROOF


def test_the_pickle_does_what_it_says(foreign, proof):
    pickle.loads(smuggled(foreign))
    assert proof.exists()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_smuggled_pickle_is_refused_and_not_loaded(original, tmp_path, proof, attack):
    assert problem_of(attack, lay_out(attack, original, tmp_path)) == ""
    assert not proof.exists()


def test_a_torch_file_named_safetensors_is_damage(foreign, proof):
    torch.save({"a": torch.ones(2), "b": Touch(proof)}, foreign / "model.safetensors")
    with pytest.raises(Damaged):
        examine(foreign)
    assert not proof.exists()


@pytest.mark.parametrize("tag", ["$bytes", "$pickle", "$object"])
def test_a_pickle_in_state_json_stays_bytes(checkpoint, proof, tag):
    content = {tag: base64.b64encode(smuggled(checkpoint)).decode()}
    entries = {"note": {"kind": "json", "value": content}}
    forge_file(checkpoint, "state.json", json.dumps({"version": 1, "entries": entries}).encode())
    value = holdfast.open(checkpoint).value("note")
    assert value == (smuggled(checkpoint) if tag == "$bytes" else content)
    assert not proof.exists()
