import pytest

from holdfast.merging.layers import LayerNames, layer_count

KEYS = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in ("mlp.experts.0.up", "mlp.experts.1.up", "q")]


def test_layers_are_the_numbers_that_the_config_counts():
    vision = [f"vision.blocks.{n}.{part}" for n in range(9) for part in "abc"]
    layers = LayerNames.of(["embed.weight", *KEYS, *vision], {"num_hidden_layers": 3})
    assert layers == LayerNames("model.layers.", 3)
    assert layers.number("model.layers.2.q.weight") == 2
    assert layers.number("vision.blocks.2.a") is None and layers.number("embed.weight") is None


def test_without_a_config_they_are_those_with_the_most_keys():
    assert LayerNames.of([*KEYS, "heads.0.w", "heads.1.w"], {}) == LayerNames("model.layers.", 3)


def test_numbers_with_gaps_are_no_layers():
    assert LayerNames.of(["a.0.w", "a.2.w"], {}) == LayerNames("", 0)


@pytest.mark.parametrize(
    ("key", "depth"),
    [("embed.weight", 0.0), *((f"model.layers.{number}.q.weight", number / 2) for number in range(3))],
)
def test_depth_goes_from_0_to_1(key, depth):
    assert LayerNames.of(KEYS, {}).depth(key) == depth


def test_the_depth_of_an_only_layer_is_1():
    assert LayerNames.of(["layers.0.w"], {}).depth("layers.0.w") == 1.0


@pytest.mark.parametrize("config", [{"n_layer": 4}, {"text_config": {"num_hidden_layers": 4}}])
def test_the_config_names_the_count_in_several_ways(config):
    assert layer_count(config) == 4
