"""What torch.save wrote is opened as groups, from both of its formats and from folders of several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, Mismatch, NotFound, Unsupported
from holdfast.core.warnings import HoldfastWarning
from holdfast.sources import open_stored
from tests.sources.made import torch_file, trained

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def same(found, group: str, tensors: dict[str, torch.Tensor]) -> None:
    assert set(found.keys(group)) == set(tensors)
    for key, tensor in tensors.items():
        assert np.array_equal(found.read(key, group), tensor.detach().numpy()), key


def numbered_moments(optimizer) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()["state"].items()
    return {f"{number}/{name}": value for number, own in states for name, value in own.items()}


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    names = {param: name for name, param in model.named_parameters()}
    return {f"{names[p]}/{n}": v for p, states in optimizer.state.items() for n, v in states.items()}


@FORMATS
def test_a_flat_dict_is_the_model(tmp_path, zipped):
    model, _ = trained()
    (tmp_path / "x.bin").write_bytes(torch_file(model.state_dict(), zipped=zipped))
    found: Any = open_stored(tmp_path / "x.bin")
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
    state: dict[str, Any] = {
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
    same(found, "optimizer", numbered_moments(optimizer))
    same(found, "rng", {"rng": state["rng"]})
    assert np.array_equal(found.read("array", "numpy"), state["numpy"]["array"])
    assert found.value("scheduler") == state["scheduler"] and found.step == 12
    assert found.value("dtype") == "torch.bfloat16" and len(found.notes) == 1
    entry = found.state["optimizer"]
    assert entry["groups"][0]["options"]["lr"] == 0.125
    assert entry["numbered"] and entry["groups"][0]["params"] == [str(n) for n in range(len(optimizer.state))]


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


def in_order(model, *keys: str) -> torch.optim.AdamW:
    """An optimizer that was given its parameters in this order, after a step in which every gradient differs."""
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([named[key] for key in keys])
    for number, param in enumerate(named.values()):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    return optimizer


def twins() -> torch.nn.Module:
    return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "abc"})


def saved_with(path: Path, optimizer_of) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = twins()
    optimizer = optimizer_of(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer


def test_numbers_are_those_of_the_live_optimizer(tmp_path):
    """All shapes agree, so that nothing but the order of the optimizers tells the states apart."""
    order = ("c.weight", "a.weight", "b.weight")
    model, optimizer = saved_with(tmp_path / "x.pt", lambda model: in_order(model, *order))
    live = twins()
    live_optimizer = torch.optim.AdamW([dict(live.named_parameters())[key] for key in order])
    report = holdfast.load(tmp_path / "x.pt", {"model": live, "optimizer": live_optimizer})
    for key, tensor in moments(model, optimizer).items():
        assert torch.equal(moments(live, live_optimizer)[key], tensor), key
    assert "stored by number" in report.notes[0]


def decayed(model) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [model["b"].weight]},
        {"params": [model["a"].weight, model["c"].weight], "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    return optimizer


def test_two_groups_are_loaded_as_torch_does(tmp_path):
    model, optimizer = saved_with(tmp_path / "x.pt", decayed)
    live = twins()
    live_optimizer = decayed(live)
    live_optimizer.param_groups[1]["weight_decay"] = 0.0
    live_optimizer.step()
    holdfast.load(tmp_path / "x.pt", {"model": live, "optimizer": live_optimizer})
    for key, tensor in moments(model, optimizer).items():
        assert torch.equal(moments(live, live_optimizer)[key], tensor), key
    assert [group["weight_decay"] for group in live_optimizer.param_groups] == [0.01, 0.5]


def test_other_groups_are_refused_and_the_reason_is_said(tmp_path):
    saved_with(tmp_path / "x.pt", decayed)
    live = twins()
    state: dict[str, Any] = {"model": live, "optimizer": torch.optim.AdamW(live.parameters())}
    with pytest.raises(Mismatch, match=r"stored by number.*\[1, 2\] parameters.*\[3\]") as caught:
        holdfast.load(tmp_path / "x.pt", state)
    assert "0/exp_avg" not in str(caught.value), "one reason, not a list of all states"
    with pytest.warns(HoldfastWarning, match="not all of the state was loaded"):
        report = holdfast.load(tmp_path / "x.pt", state, strict=False)
    assert "stored by number" in report.mismatched[0] and not state["optimizer"].state
    holdfast.load(tmp_path / "x.pt", state, ignore=["optimizer"])


def test_other_shapes_are_refused(tmp_path):
    model, optimizer = trained(tied=False)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    live, _ = trained(tied=False)
    state = {"model": live, "optimizer": torch.optim.AdamW(reversed(list(live.parameters())))}
    with pytest.raises(Mismatch, match=r"0/exp_avg has shape \[4, 6\].*3.bias, has shape \[4\].*in the saved order"):
        holdfast.load(tmp_path / "x.pt", state)


def test_numbers_are_not_taken_for_keys(tmp_path):
    """The keys of a ParameterList look like numbers, and need not be those of the optimizer."""
    model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    optimizer = in_order(model, "1", "0")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    live = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    live_optimizer = torch.optim.AdamW([live[1], live[0]])
    holdfast.load(tmp_path / "x.pt", {"model": live, "optimizer": live_optimizer}, mapping=["0 -> 0"])
    for key, tensor in moments(model, optimizer).items():
        assert torch.equal(moments(live, live_optimizer)[key], tensor), key
    convert(tmp_path / "x.pt", tmp_path / "c", ConvertOptions(mapping=MappingOptions(["0 -> first", "1 -> second"])))
    assert sorted(holdfast.open(tmp_path / "c").keys("optimizer"))[0] == "0/exp_avg"


SWAPPED = ["a.weight -> x", "b.weight -> a.weight", "x -> b.weight"]


@pytest.mark.parametrize("mapping", [["a.weight^T -> a.weight"], SWAPPED], ids=["turned", "renamed"])
def test_numbers_are_not_taken_through_a_mapping(tmp_path, mapping):
    saved_with(tmp_path / "x.pt", lambda model: in_order(model, "a.weight", "b.weight", "c.weight"))
    live = twins()
    state: dict[str, Any] = {"model": live, "optimizer": torch.optim.AdamW(live.parameters())}
    with pytest.raises(Mismatch, match="a mapping does not preserve parameter numbers"):
        holdfast.load(tmp_path / "x.pt", state, mapping=mapping)
    holdfast.load(tmp_path / "x.pt", state, mapping=mapping, ignore=["optimizer"])
    assert not state["optimizer"].state


def test_an_optimizer_stays_numbered_in_a_conversion(tmp_path):
    model, optimizer = saved_with(tmp_path / "x.pt", decayed)
    for to in ("holdfast", "dcp"):
        convert(tmp_path / "x.pt", tmp_path / to, ConvertOptions(to=to))
        live = twins()
        live_optimizer = torch.optim.AdamW(
            [{"params": [live["b"].weight]}, {"params": [live["a"].weight, live["c"].weight]}]
        )
        holdfast.load(tmp_path / to, {"model": live, "optimizer": live_optimizer})
        for key, tensor in moments(model, optimizer).items():
            assert torch.equal(moments(live, live_optimizer)[key], tensor), (to, key)


def test_a_mapped_optimizer_by_number_is_refused_or_left_out(tmp_path):
    saved_with(tmp_path / "x.pt", decayed)
    for to in ("holdfast", "dcp"):
        done = convert(tmp_path / "x.pt", tmp_path / to, ConvertOptions(to=to, mapping=MappingOptions(SWAPPED)))
        live = twins()
        with pytest.raises(
            Mismatch, match="a mapping does not preserve parameter numbers" if to == "holdfast" else "no such"
        ):
            holdfast.load(tmp_path / to, {"model": live, "optimizer": decayed(live)})
    assert "omitted optimizer" in done.notes[-1], "what DCP holds, torch would load by number"


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
    with pytest.raises(Damaged, match="which is missing"):
        open_stored(tmp_path)


def test_a_key_in_two_files_is_damage(tmp_path):
    sharded(tmp_path, [{"a": torch.ones(1)}, {"a": torch.ones(1)}])
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}})
    )
    with pytest.raises(Damaged, match="keys of another shard"):
        open_stored(tmp_path)


def test_parameters_subclasses_and_attributes(tmp_path):
    tagged: Any = torch.nn.Parameter(torch.arange(3.0))
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
    with pytest.raises(NotFound, match="not a tensor file"):
        open_stored(tmp_path / "x.pt")
    (tmp_path / "pytorch_model.bin").write_bytes(b"something else")
    with pytest.raises(Unsupported, match=r"not a torch\.save file"):
        open_stored(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="contains no tensors"):
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


def test_an_index_that_names_a_key_its_file_lacks_is_damage(tmp_path):
    sharded(tmp_path, [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(index.read_text().replace('"a"', '"gone"'))
    with pytest.raises(
        Damaged, match=r"the index lists 'gone' in pytorch_model-00001-of-00002\.bin, which has no such key"
    ):
        open_stored(tmp_path)


@pytest.mark.parametrize(
    "state",
    [{"step": torch.tensor(7)}, {"global_step": torch.tensor([7.0])}, {"train_state": {"step": torch.tensor(7)}}],
)
def test_the_step_may_be_a_tensor(tmp_path, state):
    torch.save({"model": {"w": torch.ones(3)}, **state}, tmp_path / "x.pt")
    assert open_stored(tmp_path / "x.pt").step == 7


@pytest.mark.parametrize("step", [torch.tensor(7.5), torch.tensor([7, 8]), torch.tensor(-1)])
def test_what_is_no_step_is_not_taken_for_one(tmp_path, step):
    torch.save({"model": {"w": torch.ones(3)}, "step": step}, tmp_path / "x.pt")
    assert open_stored(tmp_path / "x.pt").step is None


def test_a_ddp_model_is_loaded_into_a_plain_one(tmp_path):
    model, optimizer = trained()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    live, live_optimizer = trained(seed=1)
    holdfast.load(tmp_path / "x.pt", {"model": live, "optimizer": live_optimizer})
    for key, tensor in model.state_dict().items():
        assert torch.equal(live.state_dict()[key], tensor), key


class Mixed(torch.optim.SGD):
    """An optimizer that keeps a wide copy of each parameter in its state."""

    def fill(self, value: float) -> Mixed:
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param]["master_param"] = torch.full(param.shape, value + number)
        return self


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_masters_of_an_optimizer_are_restored(tmp_path, named, fresh):
    def made() -> tuple[torch.nn.Module, Mixed]:
        model = twins().bfloat16()
        params = list(model.named_parameters() if named else model.parameters())
        return model, Mixed(reversed(params), lr=0.5)

    model, optimizer = made()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.fill(1.001).state_dict()}, tmp_path / "x.pt")
    live, live_optimizer = made()
    if not fresh:
        live_optimizer.fill(5.0)
    holdfast.load(tmp_path / "x.pt", {"model": live, "optimizer": live_optimizer})
    for number, name in enumerate("cba"):
        found = live_optimizer.state[live[name].weight]["master_param"]
        assert torch.equal(found, torch.full((2, 2), 1.001 + number)), name
