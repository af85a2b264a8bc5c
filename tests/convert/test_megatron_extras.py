import numpy as np
import pytest

from holdfast.convert.megatron_extras import leads_to_hub, padding_note, without_extras
from holdfast.format.dtypes import dtype_named
from holdfast.mapping.program import Mapping
from holdfast.mapping.syntax.statement import Sized

CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 5}


def specs(**rows):
    names = {"embedding": "embedding.word_embeddings.weight", "output": "output_layer.weight"}
    return {names.get(key, key): Sized((count, 4), dtype_named("float32")) for key, count in rows.items()}


@pytest.mark.parametrize(
    ("written", "reverse", "expected"),
    [
        ("llama-from-megatron", False, True),
        ("llama-megatron", True, True),
        ("llama-megatron", False, False),
        ("from-megatron", True, False),
        ("a -> b", False, None),
        (["a -> b"], True, None),
        (None, False, None),
    ],
)
def test_which_built_in_mappings_make_the_hubs_names(written, reverse, expected):
    assert leads_to_hub(written, reverse=reverse) is expected


def test_rows_above_the_vocabulary_are_cut_off_and_noted():
    program = Mapping.parse("llama-from-megatron", CONFIG)
    found, notes = without_extras(program, specs(embedding=8, output=5), CONFIG)
    assert str(found).splitlines()[-2:] == [
        "embedding.word_embeddings.weight -> model.embed_tokens.weight, padding.embedding.word_embeddings.weight, "
        "axis=0, sizes=[5, 3]",
        "padding.embedding.word_embeddings.weight -> _",
    ]
    assert notes == (
        "embedding.word_embeddings.weight: dropped rows 5 to 7: by config.json vocab_size is 5, so that they are "
        "padding; check it: they are 37% of 8 rows; if the tokenizer has more than 5 tokens, their weights are lost",
    )
    _, notes = without_extras(program, specs(embedding=110), {**CONFIG, "vocab_size": 100})
    assert notes == (
        "embedding.word_embeddings.weight: dropped rows 100 to 109: by config.json vocab_size is 100, so that they are "
        "padding",
    )


@pytest.mark.parametrize("config", [None, {}, {"vocab_size": 8}, {"vocab_size": 9}, {"vocab_size": "5"}])
def test_nothing_is_cut_where_the_vocabulary_is_not_known_or_not_padded(config):
    program = Mapping.parse("llama-from-megatron", CONFIG)
    assert without_extras(program, specs(embedding=8), config) == (program, ())


def test_extra_states_are_dropped_whatever_their_names():
    program = Mapping.parse("embedding.word_embeddings.weight -> w")
    stored = specs(embedding=2) | specs(**{'a "b" c._extra_state': 0, "d._extra_state": 0})
    found, notes = without_extras(program, stored, None)
    assert len(found.statements) == 3
    assert set(found.compile(stored).recipes) == {"w"}
    assert notes == ("dropped 2 _extra_state of Megatron's layers, which the hub's models do not have",)
    assert np.prod(stored["d._extra_state"].shape) == 0


@pytest.mark.parametrize(
    ("rows", "says"),
    [(1000, "1000 rows; Megatron pads"), (32000, "32000 rows, which by default fits a tensor-parallel size of 2; Meg"),
     (128, "fits a tensor-parallel size of 1"), (512, "fits a tensor-parallel size of 4"), (2048, None)],
)  # fmt: skip
def test_rows_that_a_run_may_pad_are_noted(rows, says):
    note = padding_note(specs(embedding=rows, output=rows))
    assert (note is None) if says is None else (says in note)
    if note is not None:
        assert note.startswith("embedding.word_embeddings.weight and output_layer.weight: ")
        assert f"holdfast resize-vocab SRC PADDED --size {rows} --pad-to N" in note
    assert padding_note(specs(other=1000)) is None
