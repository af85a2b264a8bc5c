"""What is not a tensor: it goes along, follows the keys, or is said to be left out."""

import json
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.convert.sinks.dcp_state import NestedState
from holdfast.format.dtypes import dtype_named
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.sources import open_stored
from tests.cli.calls import call
from tests.convert.states import trained


def dicts():
    return {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "odd": {"x": [torch.ones(2)], "n": 4}}


@pytest.mark.parametrize("to", ["holdfast", "dcp"])
def test_plain_dicts_follow_renamed_and_removed_keys(tmp_path, to):
    holdfast.save(tmp_path / "a", dicts(), step=3)
    options = ConvertOptions(to=to, mapping=MappingOptions(["weight -> w"]), remove=("bias", "x.0"))
    convert(tmp_path / "a", tmp_path / "b", options)
    found = open_stored(tmp_path / "b")
    assert found.keys("model") == ["w"] and "odd" not in found.groups
    assert found.state["odd"] == {"kind": "json", "value": {"x": [None], "n": 4}}
    live = {"model": {"w": torch.zeros(2, 3)}}
    assert holdfast.load(tmp_path / "b", live).step == 3
    assert torch.equal(live["model"]["w"], torch.ones(2, 3))


def test_a_renamed_dict_is_given_whole_to_who_has_none(tmp_path):
    holdfast.save(tmp_path / "a", dicts())
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(mapping=MappingOptions(["weight -> w"])))
    live: dict[str, Any] = {"model": None, "odd": None}
    holdfast.load(tmp_path / "b", live)
    assert set(live["model"]) == {"w", "bias"} and torch.equal(live["model"]["w"], torch.ones(2, 3))


def test_masters_that_are_left_out_do_not_break_dcp():
    spec = TensorSpec("w/exp_avg", dtype_named("float32"), (2,))
    moments = Group("optimizer", {spec.key: Recipe.whole(Place(spec, "f", 0), spec.shape, spec.dtype)})
    entry = {"kind": "optimizer", "groups": [{"params": ["w"], "options": {"lr": 0.1}}], "masters": "master"}
    nested = NestedState(Contents({"optimizer": moments}, (), {"optimizer": entry}))
    assert list(nested.state["optimizer"]["state"]["w"]) == ["exp_avg"]


def test_the_step_survives_dcp_and_back(tmp_path):
    model, optimizer = trained()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer}, step=41)
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp"))
    state = {"step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "b")
    assert state["step"] == 41
    convert(tmp_path / "b", tmp_path / "c", ConvertOptions())
    assert holdfast.load(tmp_path / "c", {"model": model, "optimizer": optimizer}).step == 41


def test_a_dry_run_counts_all_of_a_dcp_folder(tmp_path):
    model, optimizer = trained()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    found = json.loads(call("convert", tmp_path / "a", tmp_path / "b", "--to", "dcp", "--dry-run", "--json").output)
    assert found["bytes"] == sum(group["bytes"] for group in found["groups"]) > 0


def test_what_hugging_face_and_paddle_leave_out_is_said(tmp_path):
    model, optimizer = trained()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer, "note": {"epoch": 3}, "odd": dicts()["odd"]})
    done = convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    assert done.notes == (
        "a Hugging Face folder stores only the model: omitted note, odd, optimizer",
        "the source has no config.json: from_pretrained needs it; give it with --config FILE",
    )
    done = convert(tmp_path / "a", tmp_path / "c", ConvertOptions(to="paddle"))
    assert "a Paddle checkpoint stores a model and its optimizer: omitted note, odd" in done.notes
    assert any("options of the optimizer" in note for note in done.notes)


def test_tensor_subclasses_keep_their_description(tmp_path):
    from tests.adapters.test_subclass_tensors import model_of

    model = model_of(1)
    holdfast.save(tmp_path / "c", {"model": model})
    assert call("convert", tmp_path / "c", tmp_path / "part", "--only", "first.*").exit_code == 0
    live = model_of(5)
    holdfast.load(tmp_path / "part", {"model": live}, only=["first.weight"])
    assert torch.equal(live.first.weight.data8, model.first.weight.data8)
    refused = call("convert", tmp_path / "c", tmp_path / "cast", "--dtype", "bfloat16")
    assert "first.weight was saved from a tensor subclass" in str(refused.exception)
    assert call("convert", tmp_path / "c", tmp_path / "dcp", "--to", "dcp").exit_code == 0
