import pytest

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.merging.mergekit_file import mergekit_options


def read(**fields):
    return mergekit_options({"merge_method": "linear", **fields}, "merge.yml")


def models(**parameters):
    return [{"model": "/m/a", "parameters": parameters}, {"model": {"path": "/m/b"}}]


def test_models_with_their_parameters():
    options = read(models=models(weight=[0, "1e-1"]), dtype="torch.bfloat16", parameters={"normalize": False})
    assert [model.path for model in options.models] == ["/m/a", "/m/b"]
    assert options.models[0].parameters["weight"].at("k", 1.0) == 0.1
    assert options.parameters["normalize"].at("k", 0) is False and options.dtype == "bfloat16"


def test_filters_match_a_part_of_a_key_and_the_first_decides():
    value = [{"filter": "self_attn", "value": [0, 1]}, {"filter": "[0]", "value": 0.25}, {"value": 0.5}]
    t = read(merge_method="slerp", models=models(), base_model="/m/a", parameters={"t": value}).parameters["t"]
    assert t.at("layers.0.self_attn.q", 1.0) == 1 and t.at("layers.0.mlp", 1.0) == 0.5 and t.at("x[0]y", 0) == 0.25


def test_slices_name_layers_of_models():
    part = [{"model": "/m/a", "layer_range": [0, 2]}, {"model": "/m/b", "layer_range": [1, 3]}]
    options = read(merge_method="slerp", slices=[{"sources": part}, {"sources": part[1:]}], base_model="/m/b")
    assert [model.path for model in options.models] == ["/m/a", "/m/b"] and options.base.path == "/m/b"
    assert [[(s.model, s.begin, s.end) for s in part.sources] for part in options.slices] == [
        [(0, 0, 2), (1, 1, 3)],
        [(1, 1, 3)],
    ]


def test_a_base_is_added_where_the_method_needs_one():
    options = read(merge_method="ties", models=models(weight=1, density=0.5), base_model="/m/base")
    assert [model.path for model in options.all_models] == ["/m/a", "/m/b", "/m/base"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"merge_method": "karcher", "models": models()}, "the method karcher is not supported"),
        ({"modules": {}, "chat_template": "auto", "models": models()}, "modules, chat_template: not supported"),
        ({"models": [{"model": "/m/a+/m/lora"}]}, "adapters with \\+"),
        ({"models": [{"model": {"model": {"path": "/m/a"}, "lora": {"path": "x"}}}]}, "a model with lora is not"),
        ({"slices": [{"sources": [], "residual_weight": 1}]}, "slices: residual_weight"),
        ({"models": [{"model": "/m/a", "layer_range": [0, 1]}]}, "models: layer_range"),
    ],
)
def test_what_is_not_supported_is_named(fields, text):
    with pytest.raises(Unsupported, match=text):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "either models or slices"),
        ({"models": [{"parameters": {}}]}, "expected a model, got None"),
        ({"models": ["/m/a"]}, "expected a table"),
        ({"slices": [{"sources": [{"model": "/m/a", "layer_range": [0]}]}]}, "layer_range as"),
        ({"models": models(weight=[{"filter": "x"}])}, "expected a value and a filter"),
        ({"models": models(), "base_model": "/m/c"}, "linear needs no base"),
        ({"models": models(weight=[])}, r"weight: expected a number.*got \[\]"),
        ({"models": models(weight=[{"filter": "x", "value": []}])}, r"weight: expected a number.*got \[\]"),
    ],
)
def test_what_is_wrong_is_named(fields, text):
    with pytest.raises(InvalidArgument, match=text):
        read(**fields)


def test_parameters_of_other_methods_are_noted():
    options = read(merge_method="task_arithmetic", models=models(weight=1, density=0.3), base_model="/m/a")
    assert options.notes == ("merge.yml: task_arithmetic has no density",)


@pytest.mark.parametrize(
    ("source", "tokens", "donor"), [("union", "union", None), ("base", "donor", None), ("/m/b", "donor", "/m/b")]
)
def test_the_tokenizer_source(source, tokens, donor):
    options = read(models=models(), tokenizer_source=source)
    assert (options.tokens, options.donor) == (tokens, donor)
