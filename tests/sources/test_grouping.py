"""What of a tree becomes which group."""

from __future__ import annotations

import pytest
from tests.sources.test_optimizers import leaf

from holdfast.core.errors import Unsupported
from holdfast.sources.grouping import found_in


def groups(tree):
    found = found_in("test", tree, "there")
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
    assert found["rng"] == ("tensors", ["rng"]) and found["ema"] == ("tensors", ["w"])
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
    found = found_in("test", {"w": leaf(2), "step": 4, "odd": object(), "deep": {"a": (1, None)}}, "there")
    assert found.contents.step == 4 and "odd" in found.notes[0]
    assert found.contents.state["deep"] == {"kind": "json", "value": {"a": {"$tuple": [1, None]}}}


@pytest.mark.parametrize("tree", [{"a\nb": leaf(2)}, {"k" * 2000: leaf(2)}, {"a": {"b": leaf(1)}, "a.b": leaf(2)}])
def test_keys_that_cannot_name_a_tensor_are_refused(tree):
    with pytest.raises(Unsupported):
        found_in("test", {"model": tree}, "there")


def test_nothing_is_refused():
    with pytest.raises(Unsupported, match="no tensor"):
        found_in("test", {"epoch": 1}, "there")
