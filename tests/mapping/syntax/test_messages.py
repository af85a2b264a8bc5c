# ruff: noqa: E501 - messages stand as they are printed
"""What a malformed program is answered: the line, a caret under the place, and a guess at what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from holdfast.cli.main import cli
from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch
from holdfast.mapping import Mapping
from tests.mapping.arrays import numbered, run, spec_of

QUOTES = "keys with characters other than letters, digits and _ . - / must be quoted"


def message(written: object) -> str:
    with pytest.raises(InvalidArgument) as caught:
        Mapping.parse(written)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "what", "caret"),
    [
        ("a => b", "unexpected '=>'; {quotes}; did you mean the arrow `->`?", "  ^^"),
        ("a → b", "unexpected '→'; {quotes}; did you mean the arrow `->`?", "  ^"),
        ("a -> b, dtype=“bfloat16”", "unexpected '“'; {quotes}; did you mean a plain quote, ' or \"?", " " * 14 + "^"),
        ("a^t -> b", "unexpected '^'; {quotes}; did you mean `^T`, with a capital T?", " ^"),
        ("a.{LAYER_ID} -> b", "unexpected '{{'; {quotes}; did you mean an id, such as ${{LAYER_ID}}?", "  ^"),
        ("a -> b, 'c", "an unclosed quote; {quotes}", "        ^"),
        ("a -> b, c, axis=0, sizes=[1, 2", "the [ is not closed; a list is written [8, 4], and an array [0:3]", " " * 25 + "^"),
    ],
)  # fmt: skip
def test_a_character_that_stands_wrong(text: str, what: str, caret: str) -> None:
    column = len(caret) - len(caret.lstrip()) + 1
    expected = f"mapping, line 1, column {column}: {what.format(quotes=QUOTES)}\n    {text}\n    {caret}"
    assert message(text) == expected


@pytest.mark.parametrize(
    ("text", "what", "caret"),
    [
        ("a, b -> c, axis", "axis= needs a value: write axis=0; quote a key of that name", "           ^^^^"),
        ("a -> b, permute", "permute= needs a value: write permute='[1, 0]'; quote a key of that name", "        ^^^^^^^"),
        ("a, b -> c, axis=", "expected word, found 'end of line'; axis= needs a value, such as axis=0", " " * 16 + "^"),
        ("a b -> c", "expected ->, found 'b'; a mapping statement is `sources -> targets`; is a comma missing before it?", "  ^"),
        ("a --> b", "expected ->, found '-'; a mapping statement is `sources -> targets`; did you mean the arrow `->`?", "  ^"),
        ("a = b -> c", "expected ->, found '='; a mapping statement is `sources -> targets`; did you mean the arrow `->`?", "  ^"),
        ("a -> b axis=0", "expected end of line, found 'axis'; keys and options are separated by commas; is a comma missing before it?", "       ^^^^"),
        ("a -> b, optional=True", "expected end of line, found '='; keys and options are separated by commas; optional takes no value", " " * 16 + "^"),
        ("a -> b -> c", "expected end of line, found '->'; keys and options are separated by commas; is a new line missing between two statements?", "       ^^"),
        ("a -> b, axis=0m.w -> c", "axis=0m.w is not an integer; is a comma or a new line missing after 0?", " " * 13 + "^^^^"),
        ("a -> b, dtype='float32'm -> c", "dtype='float32m' is not a dtype; write dtypes in full, such as float32 or float64; is a comma or a new line missing after 'float32'?", " " * 14 + "^" * 10),
        ("a.$layer_id -> b", "'$layer_id' is not an id: ids are $UPPER_CASE, ${UPPER_CASE} or ${UPPER_CASE-1}; quote a $ that is part of a key; did you mean $LAYER_ID?", "^" * 11),
    ],
)  # fmt: skip
def test_a_word_that_stands_wrong(text: str, what: str, caret: str) -> None:
    column = len(caret) - len(caret.lstrip()) + 1
    assert message(text) == f"mapping, line 1, column {column}: `{text}`: {what}\n    {text}\n    {caret}"


@pytest.mark.parametrize(
    ("word", "guess"),
    [("axs", "axis="), ("Axis", "axis="), ("size", "sizes="), ("num_head", "num_heads="), ("dtypes", "dtype=")],
)
def test_an_unknown_option_is_told_the_nearest(word: str, guess: str) -> None:
    text = message(f"a, b -> c, {word}=0")
    assert f"'{word}' is not an option; the options are fused_ffn, " in text
    assert f"; did you mean {guess}" in text


@pytest.mark.parametrize(("word", "guess"), [("fused_qvk", "fused_qkv"), ("Stack", "stack"), ("optionl", "optional")])
def test_a_flag_that_reads_as_a_key_is_guessed(word: str, guess: str) -> None:
    text = message(f"a, b -> c, {word}, axis=0")
    assert f"'{word}' is parsed as a key here: did you mean the option {guess}?" in text
    assert text.endswith(f"\n               {'^' * len(word)}")


def test_the_line_of_a_longer_program_is_shown() -> None:
    text = message("# a program\na -> b\n  c, d\t-> e  # joined\nf -> g\n")
    assert text.startswith("mapping, line 3, column 3: `c, d -> e`: axis= is missing")
    assert text.endswith("\n    c, d -> e\n            ^")
    text = message("# a program\na -> b\n  c,\n    d\t=> e  # joined\nf -> g\n")
    assert text.startswith("mapping, line 4, column 7: unexpected '=>'")
    assert text.endswith("\n        d => e  # joined\n          ^^")


def test_of_a_long_line_the_part_around_the_place_is_shown() -> None:
    last = message(f"{'x' * 300} -> b, axs=1").splitlines()[-2:]
    assert last[0].startswith("    ...x") and last[0].endswith("axs=1") and len(last[0]) < 120
    assert last[1].index("^") == last[0].index("axs")


def test_keys_that_are_not_there_are_pointed_at() -> None:
    array = numbered((2, 3))
    with pytest.raises(Mismatch) as caught:
        run("x -> y\nmodel.nrom -> b", {"x": array, "model.norm": array})
    assert str(caught.value).endswith("\n    model.nrom -> b\n    ^^^^^^^^^^")
    with pytest.raises(Mismatch) as caught:
        run("a -> nrom.weight", {"a": array}, {"norm.weight": spec_of(array)})
    assert str(caught.value).endswith("\n    a -> nrom.weight\n         ^^^^^^^^^^^")


def test_a_key_with_the_name_of_an_option_is_quoted_when_it_is_printed() -> None:
    mapping = Mapping.parse('a -> "axis", b, axis=0')
    assert str(mapping) == 'a -> "axis", b, axis=0\n'
    assert Mapping.parse(str(mapping)) == mapping


def test_the_command_line_shows_the_place(tmp_path: Path) -> None:
    source, program = tmp_path / "source", tmp_path / "program.map"
    source.mkdir()
    save_file({"a": torch.zeros(2, 3)}, source / "model.safetensors")
    program.write_text("# names\na => b\n")
    with pytest.raises(HoldfastError) as caught:
        CliRunner().invoke(
            cli, ["convert", str(source), str(tmp_path / "out"), "--map", str(program)],
            standalone_mode=False, catch_exceptions=False,
        )  # fmt: skip
    assert str(caught.value).startswith(f"mapping, {program}, line 2, column 3: unexpected '=>'")
    assert str(caught.value).endswith("\n    a => b\n      ^^")
