import pytest

from holdfast.convert.megatron_args import contradictions, layout_contradictions, notes_of
from tests.convert.megatron import ARGS, CONFIG

STORED = {"embedding.word_embeddings.weight": object(), "output_layer.weight": object()}
TIED = {"embedding.word_embeddings.weight": object()}
UNTIE = "untie_embeddings_and_output_weights"


def test_both_values_are_named():
    found = list(contradictions(ARGS | {"rotary_base": 500000, "norm_epsilon": 1e-5}, CONFIG, STORED))
    assert found == [
        "rms_norm_eps is 1e-06, and the args have norm_epsilon 1e-05",
        "rope_theta is 10000, and the args have rotary_base 500000",
    ]


def test_a_config_of_the_run_is_right():
    assert list(contradictions(ARGS, CONFIG, STORED)) == [] and notes_of(ARGS, CONFIG, STORED) == ()


@pytest.mark.parametrize("args", [None, [], "args", 3])
def test_without_args_nothing_is_compared_and_a_note_says_so(args):
    assert list(contradictions(args, CONFIG, STORED)) == [] and list(layout_contradictions(args, CONFIG)) == []
    (note,) = notes_of(args, CONFIG, STORED)
    assert note.startswith("rope_theta 10000 and rms_norm_eps 1e-06 of config.json not compared")


@pytest.mark.parametrize(
    ("tied", "args", "stored", "says"),
    [
        (True, {UNTIE: True}, STORED, "tie_word_embeddings is true"),
        (True, {UNTIE: True}, TIED, "tie_word_embeddings is true"),
        (False, {UNTIE: False}, TIED, "tie_word_embeddings is false"),
        (None, {UNTIE: False}, TIED, "tie_word_embeddings is false"),  # as transformers has it for Llama
        (False, {UNTIE: False}, STORED, None),
        (True, {UNTIE: False}, STORED, None),
        (True, {}, STORED, None),
    ],
)
def test_a_head_is_tied_as_in_the_run(tied, args, stored, says):
    config = CONFIG | ({} if tied is None else {"tie_word_embeddings": tied})
    found = list(contradictions(args, config, stored))
    assert [text.partition(",")[0] for text in found] == ([] if says is None else [says])


def test_a_stored_head_of_a_tied_config_is_noted_if_nothing_tells():
    args = {name: value for name, value in ARGS.items() if name != UNTIE}
    config = CONFIG | {"tie_word_embeddings": True}
    (note,) = notes_of(args, config, STORED)
    assert "stores both the embedding and a head" in note
    shared = dict.fromkeys(STORED, STORED["output_layer.weight"])
    assert notes_of(args, config, shared) == () and notes_of(args, config, TIED) == ()


@pytest.mark.parametrize(
    ("config", "window", "refused"),
    [
        ({}, None, False), ({}, [4096, 0], True), ({}, [-1, 0], False), ({}, 128, True),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 128}, None, True),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 128}, [64, 0], False),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 128}, [63, 0], False),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 128}, [62, 0], True),
        ({"model_type": "mistral", "sliding_window": None}, None, False),
    ],
)  # fmt: skip
def test_the_attention_window_is_that_of_the_run(config, window, refused):
    config = CONFIG | {"architectures": []} | config
    assert bool(list(contradictions({"window_size": window}, config, STORED))) is refused
    assert not list(contradictions({}, config, STORED))


def test_layouts_that_no_built_in_mapping_reads():
    (found,) = layout_contradictions({"apply_layernorm_1p": True, "rotary_interleaved": False}, CONFIG)
    assert found.startswith("the args have apply_layernorm_1p, by which weights of norms are stored minus 1")
    (found,) = layout_contradictions({"rotary_interleaved": True}, CONFIG)
    assert "the rows of q and k have another order" in found
    latent = {"rotary_interleaved": True, "multi_latent_attention": True}
    assert not list(layout_contradictions(latent, {"model_type": "deepseek_v3"}))
    assert not list(layout_contradictions({"apply_layernorm_1p": True}, {"model_type": "gemma"}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"vocab_size": 128},
            "vocab_size of config.json is 128, and the run's args have 61: rows 61 to 127 are padding",
        ),
        (
            {"max_position_embeddings": 4096},
            "max_position_embeddings of config.json is 4096, and the run's args have 20",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_scaling of config.json is yarn, and the run's args have",
        ),
    ],
)
def test_what_may_be_meant_is_noted(changes, says):
    assert list(contradictions(ARGS, CONFIG | changes, STORED)) == []
    (note,) = notes_of(ARGS, CONFIG | changes, STORED)
    assert note.startswith(says)
