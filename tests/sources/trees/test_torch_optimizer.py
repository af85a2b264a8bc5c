"""Optimizer states in the forms that tools store them in."""

from __future__ import annotations

import pytest

from holdfast.format.dtypes import dtype_named
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.sources.trees.leaf import TensorLeaf
from holdfast.sources.trees.torch_optimizer import keys_of, numbers_of, optimizer_entry, optimizer_in


def leaf(*shape: int, dtype: str = "float32") -> TensorLeaf:
    place = Place(TensorSpec("x", dtype_named(dtype), shape), "f", 0)
    return TensorLeaf(Recipe.whole(place, shape, place.spec.dtype))


MODEL = {"w": leaf(2, 3), "b": leaf(2), "running_mean": leaf(2), "count": leaf(2, dtype="int64")}


def test_flat_keys_with_the_parameter_first_or_last():
    a, b = leaf(2), leaf(2)
    torch_form = optimizer_in({"state.layer.0.w.exp_avg": a, "param_groups.layer.0.w.lr": 0.1})
    megatron_form = optimizer_in({"state.exp_avg.layer.0.w": a, "state.fp32_param.layer.0.w": b})
    assert torch_form.state == {"layer.0.w": {"exp_avg": a}} and torch_form.groups == [(["layer.0.w"], {"lr": 0.1})]
    assert megatron_form.state == {"layer.0.w": {"exp_avg": a, "fp32_param": b}}


def test_a_parameter_that_is_called_like_a_state_is_not_mistaken():
    a = leaf(2)
    assert optimizer_in({"state.step.scale.exp_avg": a}).state == {"step.scale": {"exp_avg": a}}


def test_equal_options_make_one_group_whatever_their_order():
    found = optimizer_in(
        {
            "state.w.exp_avg": leaf(2),
            "param_groups.w.lr": 0.1,
            "param_groups.w.eps": 0.2,
            "param_groups.b.eps": 0.2,
            "param_groups.b.lr": 0.1,
            "param_groups.c.lr": 0.3,
        }
    )
    assert [params for params, _ in found.groups] == [["w", "b"], ["c"]]


@pytest.mark.parametrize(
    "value", [{}, 5, {"state": 3}, {"other": {}}, {"state": {0: 1}}, {"param_groups": [{"lr": 1}]}]
)
def test_other_values_are_no_optimizers(value):
    assert optimizer_in(value) is None


def numbered(*shapes: tuple[int, ...], groups: int = 1):
    state = {number: {"exp_avg": leaf(*shape), "step": leaf()} for number, shape in enumerate(shapes)}
    params = list(range(len(shapes)))
    cut = [params] if groups == 1 else [params[:1], params[1:]]
    return optimizer_in({"state": state, "param_groups": [{"params": own, "lr": 1} for own in cut]})


def test_numbers_are_not_guessed():
    assert keys_of(numbered((2, 3), (2,)), MODEL) is None, "the order of the model need not be the optimizer's"
    assert numbers_of(numbered((2, 3), (2,), groups=2)) == {0: "0", 1: "1"}


def named(*names: str):
    params = list(range(len(names)))
    state = {number: {"exp_avg": leaf(2)} for number in params}
    return optimizer_in({"state": state, "param_groups": [{"params": params, "param_names": list(names)}]})


def test_names_are_taken_where_they_are_the_models():
    assert keys_of(named("b", "w"), MODEL) == {0: "b", 1: "w"}
    assert keys_of(named("module.b", "module.w"), MODEL) == {0: "b", 1: "w"}
    assert keys_of(named("b", "other"), MODEL) is None
    assert keys_of(named("b", "other"), {}) == {0: "b", 1: "other"}, "no model says otherwise"


def test_numbers_are_positions_over_the_groups():
    found = optimizer_in({"state": {7: {"m": leaf(2)}}, "param_groups": [{"params": [7]}, {"params": [3]}]})
    assert found is not None and numbers_of(found) == {7: "0", 3: "1"}
    found = optimizer_in({"state": {"3": {"m": leaf(2)}}})
    assert found is not None and numbers_of(found) == {3: "3"}, "a file without groups"


def test_the_entry_says_what_is_no_tensor():
    found = optimizer_in(
        {
            "state": {"w": {"step": 5, "exp_avg": leaf(2)}, "b": {}},
            "param_groups": [{"params": ["w", "b"], "lr": 0.5, "betas": (0.1, 0.2), "odd": object()}],
        }
    )
    assert found is not None
    entry = optimizer_entry(found, {"w": "w", "b": "b"}, "optimizer")
    assert entry["scalars"] == {"w": {"step": 5}} and entry["stateless"] == ["b"]
    assert entry["groups"] == [{"params": ["w", "b"], "options": {"lr": 0.5, "betas": {"$tuple": [0.1, 0.2]}}}]
