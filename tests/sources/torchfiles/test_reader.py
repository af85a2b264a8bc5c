"""What torch.save wrote is opened as groups, from both of its formats and from folders of several files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.sources.made import torch_file, trained

import holdfast
from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.sources import open_stored

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def same(found, group: str, tensors: dict[str, torch.Tensor]) -> None:
    assert set(found.keys(group)) == set(tensors)
    for key, tensor in tensors.items():
        assert np.array_equal(found.read(key, group), tensor.detach().numpy()), key


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    names = {param: name for name, param in model.named_parameters()}
    return {f"{names[p]}/{n}": v for p, states in optimizer.state.items() for n, v in states.items()}


@FORMATS
def test_a_flat_dict_is_the_model(tmp_path, zipped):
    model, _ = trained()
    (tmp_path / "x.bin").write_bytes(torch_file(model.state_dict(), zipped=zipped))
    found = open_stored(tmp_path / "x.bin")
    assert found.groups == ("model",) and found.format == "torch"
    same(found, "model", model.state_dict())
    assert dict(found.contents.groups["model"].aliases) == {"3.weight": "2.weight"}


@FORMATS
@pytest.mark.parametrize(
    "names", [("model", "optimizer"), ("state_dict", "optim"), ("model_state_dict", "optimizer_state_dict")]
)
def test_a_training_checkpoint_has_all_its_parts(tmp_path, zipped, names):
    model, optimizer = trained()
    first, second = names
    state = {
        first: model.state_dict(),
        second: optimizer.state_dict(),
        "step": 12,
        "scheduler": {"base_lrs": [0.1], "last_epoch": 3, "pair": (1, None)},
        "rng": torch.get_rng_state(),
        "numpy": {"array": np.arange(6).reshape(2, 3), "scalar": np.float32(1.5)},
        "dtype": torch.bfloat16,
    }
    (tmp_path / "x.pt").write_bytes(torch_file(state, zipped=zipped))
    found = open_stored(tmp_path / "x.pt")
    same(found, "model", model.state_dict())
    same(found, "optimizer", moments(model, optimizer))
    same(found, "rng", {"rng": state["rng"]})
    assert np.array_equal(found.read("array", "numpy"), state["numpy"]["array"])
    assert found.value("scheduler") == state["scheduler"] and found.step == 12
    assert found.value("dtype") == "torch.bfloat16" and found.notes == ()
    entry = found.state["optimizer"]
    assert entry["groups"][0]["options"]["lr"] == 0.125
    assert entry["groups"][0]["params"] == [name for name, _ in model.named_parameters()]


@FORMATS
def test_it_is_loaded_into_live_objects(tmp_path, zipped):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    (tmp_path / "x.pt").write_bytes(torch_file(state, zipped=zipped))
    live, live_optimizer = trained(seed=1)
    live_optimizer.param_groups[0]["lr"] = 7.0
    holdfast.load(tmp_path / "x.pt", {"model": live, "optimizer": live_optimizer})
    for key, tensor in model.state_dict().items():
        assert torch.equal(live.state_dict()[key], tensor), key
    for key, tensor in moments(model, optimizer).items():
        assert torch.equal(moments(live, live_optimizer)[key], tensor), key
    assert live_optimizer.param_groups[0]["lr"] == 0.125


def test_numbers_that_are_not_certain_are_not_guessed(tmp_path):
    model, _ = trained()
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias, model[2].weight]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    found = open_stored(tmp_path / "x.pt")
    assert found.contents.groups["optimizer"].kind == "tensors"
    assert "state.0.exp_avg" in found.keys("optimizer") and "numbers its parameters" in found.notes[0]


def test_names_of_parameters_are_taken_from_the_file(tmp_path):
    model, _ = trained()
    named = dict(model.named_parameters())
    groups = [{"params": [("2.weight", named["2.weight"])]}, {"params": [("0.weight", named["0.weight"])]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    found = open_stored(tmp_path / "x.pt")
    expected = optimizer.state[model[2].weight]["exp_avg"].numpy()
    assert np.array_equal(found.read("2.weight/exp_avg", "optimizer"), expected)


def sharded(folder: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"pytorch_model-{number:05}-of-{len(parts):05}.bin"
        (folder / name).write_bytes(torch_file(part))
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_folder_of_several_files(tmp_path):
    parts = [{"a": torch.arange(4.0)}, {"b": torch.ones(2, 3)}]
    sharded(tmp_path, parts)
    same(open_stored(tmp_path), "model", parts[0] | parts[1])
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(Damaged, match="which is not there"):
        open_stored(tmp_path)


def test_a_key_in_two_files_is_damage(tmp_path):
    sharded(tmp_path, [{"a": torch.ones(1)}, {"a": torch.ones(1)}])
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}})
    )
    with pytest.raises(Damaged, match="keys of another part"):
        open_stored(tmp_path)


def test_parameters_subclasses_and_attributes(tmp_path):
    tagged = torch.nn.Parameter(torch.arange(3.0))
    tagged.note = "mine"
    buffer = torch.nn.Buffer(torch.ones(2))
    torch.save({"p": tagged, "q": torch.nn.Parameter(torch.zeros(2)), "b": buffer}, tmp_path / "x.pt")
    same(open_stored(tmp_path / "x.pt"), "model", {"p": tagged.data, "q": torch.zeros(2), "b": torch.ones(2)})


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
    ids=["sparse", "conjugated", "a module"],
)
def test_what_is_no_plain_tensor_is_refused_by_its_name(tmp_path, tensor, says):
    torch.save({"x": tensor}, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match=says):
        open_stored(tmp_path / "x.pt")


def test_other_files_are_not_taken_for_it(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"something else")
    with pytest.raises(NotFound, match="not a file of tensors"):
        open_stored(tmp_path / "x.pt")
    (tmp_path / "pytorch_model.bin").write_bytes(b"something else")
    with pytest.raises(Unsupported, match=r"not a file of torch\.save"):
        open_stored(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="no tensor in it"):
        open_stored(tmp_path / "x.pt")


@FORMATS
def test_every_cut_is_refused(tmp_path, zipped):
    data = torch_file({"a": torch.arange(8.0)}, zipped=zipped)
    for size in range(20, len(data), 13 if zipped else 3):
        (tmp_path / "x.pt").write_bytes(data[:size])
        with pytest.raises(holdfast.HoldfastError):
            open_stored(tmp_path / "x.pt").read("a")


def test_a_link_that_the_user_names_is_followed(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "real.pt")
    (tmp_path / "link.pt").symlink_to("real.pt")
    assert open_stored(tmp_path / "link.pt").read("a") == 1
