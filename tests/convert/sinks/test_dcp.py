import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.convert.sinks import dcp_writer
from holdfast.core.errors import Damaged
from tests.convert.states import save, tensor_files, trained


def load(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)


@pytest.mark.parametrize("chunk_bytes", [500, 32 << 20])
def test_dcp_loads_the_model_and_the_optimizer_bit_for_bit(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(dcp_writer, "_CHUNK_BYTES", chunk_bytes)
    save(tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp"))
    assert sorted(os.listdir(tmp_path / "b")) == [".metadata", "__0_0.distcp"]
    assert "is a pickle" in done.notes[0]
    model, optimizer = trained(seed=11)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "note": {"epoch": 0}}
    load(state, tmp_path / "b")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    expected_model, expected_optimizer = trained()
    assert state["note"] == {"epoch": 3}
    assert optimizer.param_groups[0]["lr"] == 0.01
    for parameter, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        found, wanted = optimizer.state[parameter], expected_optimizer.state[expected]
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_odd_dtypes_shapes_and_ties(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp", only=("odd",)))
    state = {
        "odd": {
            "half": torch.zeros(7, 5, dtype=torch.bfloat16),
            "wave": torch.zeros(2, dtype=torch.complex128),
            "none": torch.zeros(0, 5),
            "one": torch.tensor(0.0),
            "bits": torch.zeros(11, dtype=torch.bool),
        }
    }
    load(state, tmp_path / "b")
    assert state["odd"]["one"] == 3.5 and state["odd"]["wave"].tolist() == [3 + 4j, 1j]
    assert state["odd"]["bits"].tolist() == [number % 2 == 0 for number in range(11)]
    tied: Any = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    tied["head"].weight = tied["embed"].weight
    holdfast.save(tmp_path / "t", {"model": tied})
    convert(tmp_path / "t", tmp_path / "u", ConvertOptions(to="dcp"))
    both = {"model": {"embed.weight": torch.zeros(5, 3), "head.weight": torch.zeros(5, 3)}}
    load(both, tmp_path / "u")
    assert torch.equal(both["model"]["embed.weight"], tied["embed"].weight)
    assert torch.equal(both["model"]["head.weight"], tied["embed"].weight)


def test_damage_is_found_and_nothing_is_left(tmp_path):
    save(tmp_path / "a")
    place = holdfast.open(tmp_path / "a").places["model"]["0.weight"]
    path = tmp_path / "a" / place.file
    data = bytearray(path.read_bytes())
    data[place.begin + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"It holds .*0\.weight"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp"))
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_is_there_is_replaced_with_force(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp"))
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp", only=("model",), force=True))
    keys = dcp.FileSystemReader(tmp_path / "b").read_metadata().state_dict_metadata
    assert len(keys) == 7 and all(key.startswith("model.") for key in keys if key != "step")


def test_there_and_back_is_every_byte(tmp_path):
    model, optimizer = trained()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp"))
    convert(tmp_path / "b", tmp_path / "c", ConvertOptions())
    assert tensor_files(tmp_path / "c") == tensor_files(tmp_path / "a")
    fresh_model, fresh_optimizer = trained(seed=12)
    holdfast.load(tmp_path / "c", {"model": fresh_model, "optimizer": fresh_optimizer})
    assert torch.equal(fresh_model[0].weight, model[0].weight)
    assert fresh_optimizer.param_groups[0]["lr"] == 0.01
