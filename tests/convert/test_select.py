import pytest

from holdfast.convert.select import cast_models, model_dtype, select_contents
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe


def recipe(key, dtype="float32"):
    spec = TensorSpec(key, dtype_named(dtype), (2,))
    return Recipe.whole(Place(spec, "f", 0), (2,), spec.dtype)


def contents():
    model = {"a.w": recipe("a.w"), "b.w": recipe("b.w"), "ids": recipe("ids", "int64"), "q": recipe("q", "float8_e5m2")}
    states = {f"{key}/exp_avg": recipe(key) for key in ("a.w", "b.w")}
    optimizer = {
        "kind": "optimizer",
        "groups": [{"params": ["a.w", "b.w"], "options": {"lr": 1}}],
        "stateless": ["b.w"],
        "scalars": {"a.w": {"step": 1}},
        "masters": None,
    }
    return Contents(
        {
            "model": Group("module", model, {"tied": "a.w"}, {}),
            "optimizer": Group("optimizer", states),
            "master_weights": Group("masters", {"a.w": recipe("a.w")}),
        },
        (),
        {"optimizer": optimizer, "note": {"kind": "json", "value": 3}},
    )


def keys(found):
    return {name: sorted(group.tensors) for name, group in found.groups.items()}


def test_nothing_asked_is_nothing_done():
    whole = contents()
    assert select_contents(whole, (), ()) is whole


def test_a_group_stands_for_all_of_it():
    found = select_contents(contents(), ("model",), ())
    assert keys(found) == {"model": ["a.w", "b.w", "ids", "q"]} and not found.state
    assert found.groups["model"].aliases == {"tied": "a.w"}


def test_what_is_removed_takes_its_state_along():
    found = select_contents(contents(), (), ("a.*",))
    assert keys(found) == {"model": ["b.w", "ids", "q"], "optimizer": ["b.w/exp_avg"]}
    assert found.groups["model"].aliases == {}
    entry = found.state["optimizer"]
    assert entry["groups"] == [{"params": ["b.w"], "options": {"lr": 1}}]
    assert entry["scalars"] == {} and entry["stateless"] == ["b.w"]
    assert found.state["note"] == {"kind": "json", "value": 3}


def test_only_keys_take_their_state_along():
    found = select_contents(contents(), ("a.w",), ())
    assert keys(found) == {"model": ["a.w"], "optimizer": ["a.w/exp_avg"], "master_weights": ["a.w"]}
    assert found.state["optimizer"]["groups"][0]["params"] == ["a.w"]
    assert select_contents(contents(), ("tied",), ()).groups["model"].tensors.keys() == {"a.w"}


def test_a_key_of_one_group_is_named_with_it():
    assert keys(select_contents(contents(), (), ("optimizer/a.w/*",)))["optimizer"] == ["b.w/exp_avg"]
    assert keys(select_contents(contents(), (), ("optimizer/a.w/*",)))["model"] == ["a.w", "b.w", "ids", "q"]


def test_a_pattern_that_fits_nothing_is_a_mistake():
    with pytest.raises(InvalidArgument, match="matches the pattern 'lm_head'"):
        select_contents(contents(), (), ("lm_head",))
    with pytest.raises(NotFound, match="no tensor of the source is left"):
        select_contents(contents(), ("model",), ("model",))


def test_a_cast_is_of_the_models_wide_floats_alone():
    found = cast_models(select_contents(contents(), (), ("q",)), model_dtype("bfloat16"), {})
    dtypes = {key: recipe.dtype.name for key, recipe in found.groups["model"].tensors.items()}
    assert dtypes == {"a.w": "bfloat16", "b.w": "bfloat16", "ids": "int64"}
    assert found.groups["optimizer"] == contents().groups["optimizer"]
    assert found.groups["master_weights"] == contents().groups["master_weights"]


def test_a_cast_of_eight_bit_floats_is_refused_by_name():
    with pytest.raises(Unsupported, match="--dtype bfloat16: model: 'q' is float8_e5m2"):
        cast_models(contents(), model_dtype("bfloat16"), {})


def test_a_dtype_that_models_are_not_cast_to():
    with pytest.raises(InvalidArgument, match="--dtype int8: a model can be cast to float64, float32"):
        model_dtype("int8")
