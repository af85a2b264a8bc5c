import pytest

from holdfast.convert.megatron_config import check_config, check_given, check_values
from holdfast.core.errors import Mismatch
from holdfast.format.dtypes import dtype_named
from holdfast.mapping.syntax.statement import Sized
from tests.convert.megatron import ARGS, CONFIG

LAYER = {"linear_qkv": (64, 32), "linear_proj": (32, 32)}
SAME_SHAPES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}


def stored(*, stacked, **more):
    shapes = {"embedding.word_embeddings.weight": (128, 32)}
    for name, shape in {**LAYER, **more}.items():
        for layer in ("",) if stacked else ("0.", "1."):
            shapes[f"decoder.layers.{layer}self_attention.{name}.weight"] = (2, *shape) if stacked else shape
    return {key: Sized(shape, dtype_named("float32")) for key, shape in shapes.items()}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("args", [ARGS, None])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and the checkpoint has 2"),
        ({"hidden_size": 64, "head_dim": 8}, "hidden_size is 64, and the checkpoint has 32"),
        ({"vocab_size": 129}, "vocab_size is 129, and the checkpoint's embedding has 128 rows"),
        ({"num_key_value_heads": 4}, "num_key_value_heads x head_dim, 4 x 8, is 32, and the checkpoint has 16"),
        ({"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads x head_dim, 8 x 8, is 64"),
        ({"num_key_value_heads": None}, "num_key_value_heads x head_dim, 4 x 8, is 32, and the checkpoint has 16"),
    ],
)
def test_numbers_that_shapes_contradict(stacked, args, changes, says):
    with pytest.raises(Mismatch) as error:
        check_config(stored(stacked=stacked), args, CONFIG | changes)
    assert "config.json is not that of this checkpoint" in str(error.value) and says in str(error.value)


def test_numbers_that_only_args_contradict():
    with pytest.raises(
        Mismatch, match="num_attention_heads is 8, and the checkpoint has 4; num_key_value_heads is 4, "
    ):
        check_config(stored(stacked=True), ARGS, CONFIG | SAME_SHAPES)
    note, values = check_config(stored(stacked=True), None, CONFIG | SAME_SHAPES)
    assert "rope_theta 10000 and rms_norm_eps 1e-06 of config.json not compared" in values
    assert "num_attention_heads 8 and num_key_value_heads 4 of config.json are taken as they are" in note


def test_a_vocabulary_smaller_than_that_of_the_args_is_refused():
    with pytest.raises(Mismatch, match="vocab_size is 50, and the checkpoint's args have 61, which would lose tokens"):
        check_config(stored(stacked=True), ARGS | {"vocab_size": 61}, CONFIG | {"vocab_size": 50})
    (note,) = check_config(stored(stacked=True), ARGS | {"vocab_size": 60}, CONFIG)
    assert "rows 60 to 60 are padding or unused" in note


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            SAME_SHAPES,
            "num_attention_heads is 8, and SRC's is 4; num_key_value_heads is 4, and SRC's is 2; head_dim is 4",
        ),
        ({"hidden_size": 64, "head_dim": 8}, "hidden_size is 64, and SRC's is 32; omit --config"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and SRC's is 2; omit --config"),
        ({"vocab_size": 64}, "vocab_size is 64, and SRC's is 61; omit --config"),
    ],
)
def test_a_given_config_is_that_of_the_source(changes, says):
    with pytest.raises(Mismatch) as error:
        check_given(CONFIG | changes, CONFIG)
    assert says in str(error.value)
    check_given(CONFIG, CONFIG | {"head_dim": 8, "rope_theta": 5})
    check_given(CONFIG | changes, {"vocab_size": None})


def test_norms_of_heads_tell_the_size_of_a_head():
    with pytest.raises(Mismatch, match="head_dim is 4, and the checkpoint has 8"):
        check_config(stored(stacked=True, q_layernorm=(8,)), None, CONFIG | SAME_SHAPES)
    (note,) = check_config(stored(stacked=True, q_layernorm=(8,)), None, CONFIG)
    assert "num_attention_heads" not in note and "rope_theta" in note


@pytest.mark.parametrize(
    ("args", "kv_heads"), [(ARGS, 2), ({**ARGS, "group_query_attention": False, "num_query_groups": 1}, 4)]
)
def test_what_fits(args, kv_heads):
    shapes = stored(stacked=False, linear_qkv=(32 + 2 * 8 * kv_heads, 32))
    assert check_config(shapes, args, CONFIG | {"num_key_value_heads": kv_heads}) == ()


@pytest.mark.parametrize("args", [None, [], {}, {"num_attention_heads": "4"}])
@pytest.mark.parametrize("config", [{}, {"num_attention_heads": 4}, CONFIG])
def test_what_is_not_known_is_not_compared(args, config):
    check_config(stored(stacked=True), args, config)
    assert all("not compared" in note for note in check_config({}, args, config))


def test_latent_attention_has_heads_of_its_own():
    shapes = {"decoder.layers.0.self_attention.linear_kv_up_proj.weight": Sized((8, 4), dtype_named("float32"))}
    args = {"num_attention_heads": 4, "kv_channels": 9, "group_query_attention": True, "num_query_groups": 1}
    config = CONFIG | {"num_hidden_layers": 1, "num_key_value_heads": 4}
    assert all("not compared" in note for note in check_config(shapes, args, config))
    with pytest.raises(Mismatch, match="num_attention_heads is 4, and the checkpoint has 8"):
        check_config(shapes, args | {"num_attention_heads": 8}, config)


def test_the_file_of_the_config_is_named_where_it_was_given():
    with pytest.raises(
        Mismatch, match=r"^hub/config\.json is not that of this checkpoint: .*; correct it, or give the"
    ):
        check_config(stored(stacked=True), ARGS, CONFIG | {"rope_theta": 5e5}, "hub/config.json")
    with pytest.raises(
        Mismatch, match=r"^config\.json is not that of this checkpoint: rope_theta .*; give the model's"
    ):
        check_config(stored(stacked=True), ARGS, CONFIG | {"rope_theta": 5e5})


def test_layouts_are_refused_for_built_in_mappings_only():
    args = ARGS | {"apply_layernorm_1p": True}
    with pytest.raises(Mismatch, match="apply_layernorm_1p"):
        check_config(stored(stacked=True), args, CONFIG)
    assert check_values(stored(stacked=True), args, CONFIG) == ()
    with pytest.raises(Mismatch, match="rope_theta is 10000, and the args have rotary_base 5"):
        check_values(stored(stacked=True), args | {"rotary_base": 5}, CONFIG)
