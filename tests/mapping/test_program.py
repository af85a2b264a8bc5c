"""`Mapping.parse`: texts, files, lists and what Paddle's model files give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.core import limits
from holdfast.core.errors import HoldfastError, InvalidArgument, NotFound
from holdfast.mapping import Mapping

TEXT = "a -> b\nc^T -> d  # turned\n"
WANTED = Mapping.parse(TEXT)


def test_texts_lists_and_objects() -> None:
    assert len(WANTED.statements) == 2
    assert Mapping.parse(["a -> b", "c^T -> d"]) == WANTED
    assert Mapping.parse({"aoa_statements": ["a -> b", "c^T -> d"]}) == WANTED
    assert Mapping.parse(WANTED) is WANTED
    assert Mapping.parse("a -> b").statements == WANTED.statements[:1]
    assert Mapping.parse("") == Mapping.parse("  # nothing") == Mapping.parse([]) == Mapping()


@pytest.mark.parametrize(
    "content",
    [TEXT, "\ufeff" + TEXT, json.dumps(["a -> b", "c^T -> d"]), json.dumps({"aoa_statements": ["a -> b", "c^T -> d"]})],
)
def test_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "my-mapping"
    path.write_text(content, encoding="utf-8")
    assert Mapping.parse(path) == WANTED
    assert Mapping.parse(str(path)) == WANTED


def test_an_error_in_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "wrong.map"
    path.write_text("a -> b\n\nc d\n")
    with pytest.raises(InvalidArgument, match=r"wrong\.map, line 3, column 3"):
        Mapping.parse(path)
    path.write_bytes(b"a -> \xff")
    with pytest.raises(InvalidArgument, match="not valid UTF-8 at byte 5"):
        Mapping.parse(path)
    path.write_text("[1]")
    with pytest.raises(InvalidArgument, match=r"wrong\.map, line 1: a statement is a string, not int"):
        Mapping.parse(path)
    with pytest.raises(InvalidArgument, match="cannot read the mapping"):
        Mapping.parse(tmp_path)


@pytest.mark.parametrize("word", ["llama-nothing", "a\0b", "x" * 5000, "a b"])
def test_a_word_that_means_nothing_is_refused(word: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a mapping"):
        Mapping.parse(word)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such mapping file"):
        Mapping.parse(tmp_path / "none")


@pytest.mark.parametrize("wrong", [5, None, b"a -> b", {"statements": []}, {"aoa_statements": "a -> b"}, [["a -> b"]]])
def test_values_that_are_no_mapping(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        Mapping.parse(wrong)  # type: ignore[arg-type]


def test_an_item_of_a_list_is_a_line() -> None:
    with pytest.raises(InvalidArgument, match="line 2, column 3"):
        Mapping.parse(["a -> b", "c d"])
    assert [s.line for s in Mapping.parse(["a -> b", "", "c -> d"]).statements] == [1, 3]


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "MAPPING_STATEMENTS", 3)
    with pytest.raises(InvalidArgument, match=r"line 4.*more than 3 statements"):
        Mapping.parse("a -> b\n" * 5)
    monkeypatch.setattr(limits, "MAPPING_BYTES", 20)
    (tmp_path / "long").write_text("a -> b\n" * 3)
    for long in ("a -> b\n" * 3, ["a -> b"] * 4, tmp_path / "long"):
        with pytest.raises(HoldfastError, match=r"limit of 20|at most 20 bytes"):
            Mapping.parse(long)


def test_it_is_a_value_that_prints_as_its_program() -> None:
    assert str(WANTED) == "a -> b\nc^T -> d\n"
    assert hash(WANTED) == hash(Mapping.parse(str(WANTED)))
