"""What of a tree becomes which group."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Unsupported
from holdfast.sources.trees.groups import result_of_tree
from tests.sources.trees.test_torch_optimizer import leaf


def groups(tree):
    found = result_of_tree("test", tree, "there")
    return {name: (group.kind, sorted(group.tensors)) for name, group in found.contents.groups.items()}


def test_names_that_tools_give_to_a_model():
    for name in ("model", "state_dict", "model_state_dict", "module"):
        assert groups({name: {"w": leaf(2)}, "epoch": 1}) == {"model": ("module", ["w"])}


def test_a_dict_of_tensors_is_a_model():
    assert groups({"w": leaf(2), "epoch": 3}) == {"model": ("module", ["w"])}
    assert groups({"w": leaf(2), "nested": {"x": leaf(3)}})["nested"] == ("tensors", ["x"])


def test_a_lone_tensor_and_a_list():
    assert groups(leaf(2)) == {"model": ("module", ["value"])}
    assert groups([leaf(2), leaf(3)]) == {"tensors": ("tensors", ["0", "1"])}


def test_what_is_beside_a_model_keeps_its_name():
    found = groups({"model": {"w": leaf(2)}, "rng": leaf(5), "ema": {"w": leaf(2)}, "a b": {"x": leaf(1)}})
    assert found["rng"] == ("tensors", ["rng"]) and found["ema"] == ("module", ["w"])
    assert found["tensors"] == ("tensors", ["x"]), "a name that no file may have"


def test_masters_go_to_their_own_group():
    tree = {"decoder.w": leaf(2)} | {f"optimizer.state.{n}.decoder.w": leaf(2) for n in ("exp_avg", "fp32_param")}
    assert groups(tree) == {
        "model": ("module", ["decoder.w"]),
        "optimizer": ("optimizer", ["decoder.w/exp_avg"]),
        "master_weights": ("masters", ["decoder.w"]),
    }


def test_a_prefix_that_only_the_model_has_is_taken_away():
    tree = {"model.decoder.w": leaf(2), "optimizer.state.exp_avg.decoder.w": leaf(2)}
    assert groups(tree)["model"] == ("module", ["decoder.w"])
    assert groups({"model.decoder.w": leaf(2)})["model"] == ("module", ["model.decoder.w"])


def test_values_are_kept_or_said_to_be_left_out():
    found = result_of_tree("test", {"w": leaf(2), "step": 4, "odd": object(), "deep": {"a": (1, None)}}, "there")
    assert found.contents.step == 4 and "odd" in found.notes[0]
    assert found.contents.state["deep"] == {"kind": "json", "value": {"a": {"$tuple": [1, None]}}}


@pytest.mark.parametrize("tree", [{"a\nb": leaf(2)}, {"k" * 2000: leaf(2)}, {"a": {"b": leaf(1)}, "a.b": leaf(2)}])
def test_keys_that_cannot_name_a_tensor_are_refused(tree):
    with pytest.raises(Unsupported):
        result_of_tree("test", {"model": tree}, "there")


def test_nothing_is_refused():
    with pytest.raises(Unsupported, match="no tensor"):
        result_of_tree("test", {"epoch": 1}, "there")


def test_averages_are_a_model_and_said_not_to_follow_a_mapping():
    found = result_of_tree("test", {"model": {"w": leaf(2)}, "ema": {"w": leaf(2)}, "stats": {"w": leaf(3)}}, "there")
    assert found.contents.groups["ema"].kind == "module" and found.contents.groups["stats"].kind == "tensors"
    assert len(found.notes) == 1 and "ema has keys and shapes of the model" in found.notes[0]
    assert found.contents.state["ema"]["value"] == {"w": {"$tensor": "w"}}


def test_averages_that_a_conversion_wrote_have_their_group_again():
    tree = {"model": {"w": leaf(2)}, "ema.model": {"w": leaf(2)}, "ema": {"count": 3}}
    assert groups(tree) == {"model": ("module", ["w"]), "ema/model": ("module", ["w"])}
    assert sorted(result_of_tree("test", tree, "there").contents.state) == ["ema"]
    assert groups(tree | {"ema.model": {"w": leaf(3)}})["ema.model"] == ("tensors", ["w"])


def test_models_by_other_names():
    found = groups({"actor": {"0.weight": leaf(2)}, "critic": {"0.bias": leaf(3)}, "scaler": {"scale": leaf()}})
    assert found["actor"] == ("module", ["0.weight"]) and found["critic"] == ("module", ["0.bias"])
    assert found["scaler"] == ("tensors", ["scale"])


def stored(*shapes: int, **more):
    state = {n: {"exp_avg": leaf(size)} | {k: leaf(size) for k in more} for n, size in enumerate(shapes)}
    return {"state": state, "param_groups": [{"params": list(state), "lr": 0.5}]}


@pytest.mark.parametrize("names", [("optim", "optimizer_state"), ("optimizer", "optim"), ("optim", "opt_critic")])
def test_no_optimizer_of_two_is_lost(names):
    found = result_of_tree("test", {"model": {"w": leaf(2)}, names[0]: stored(2), names[1]: stored(2, 2)}, "there")
    assert set(found.contents.groups) == {"model", *names}
    assert [len(found.contents.groups[name].tensors) for name in names] == [1, 2]
    assert set(found.contents.state) == set(names)


def test_a_lone_optimizer_has_the_usual_name():
    assert set(groups({"model": {"w": leaf(2)}, "optim": stored(2)})) == {"model", "optimizer"}
    assert groups(stored(2)) == {"optimizer": ("optimizer", ["0/exp_avg"])}, "a file of an optimizer alone"


def by_key(*keys: str, size: int = 2):
    state = {key: {"exp_avg": leaf(size), "master": leaf(size)} for key in keys}
    return {"state": state, "param_groups": [{"params": list(keys)}]}


def test_masters_of_two_optimizers_are_beside_their_modules():
    tree = {"actor": {"weight": leaf(2)}, "critic": {"weight": leaf(3)}}
    found = groups(tree | {"opt_a": by_key("weight"), "opt_c": by_key("weight", size=3)})
    assert found["actor.master_weights"] == ("masters", ["weight"])
    assert found["critic.master_weights"] == ("masters", ["weight"])


def test_masters_that_are_there_twice_are_taken_once():
    tree = {"model": {"w": leaf(2)}, "master_weights": {"w": leaf(2)}, "optimizer": by_key("w")}
    assert groups(tree)["master_weights"] == ("masters", ["w"]) and len(groups(tree)) == 3


def test_the_prefix_of_ddp_is_taken_from_every_key_or_from_none():
    tree = {"model": {"module.w": leaf(2), "module.b": leaf(3)}, "ema": {"module.w": leaf(2)}}
    found = result_of_tree("test", tree, "there", unwrap_ddp=True)
    assert sorted(found.contents.groups["model"].tensors) == ["b", "w"] and "'module.'" in found.notes[0]
    assert list(found.contents.groups["ema"].tensors) == ["w"]
    assert found.contents.state["ema"]["value"] == {"w": {"$tensor": "w"}}
    tree["model"]["n_averaged"] = leaf()
    kept = result_of_tree("test", tree, "there", unwrap_ddp=True).contents.groups["model"].tensors
    assert sorted(kept) == ["module.b", "module.w", "n_averaged"]


def test_values_inside_a_model_that_are_not_tensors_are_named():
    model = {"w": leaf(2), "version": 3, "inner": {"b": leaf(1), "extra": [1, 2]}}
    notes = result_of_tree("test", {"model": model, "epoch": 2}, "there").notes
    assert notes == ("there: left out: 2 values of the model that are not tensors: version, inner.extra",)
