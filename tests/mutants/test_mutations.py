"""Mutations: each kind is made, compiles, and leaves annotations, docstrings and messages alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import record
from tests.mutants.mutations import Mutation, mutations
from tests.mutants.record import KILLED, SURVIVED, Record, Result, explanation

HEAD = "def f(a, b):\n    "


def made(statement: str) -> set[tuple[str, str]]:
    return {(each.kind, each.after) for each in mutations("f.py", f"{HEAD}{statement}\n".encode())}


@pytest.mark.parametrize(
    ("statement", "kind", "after"),
    [
        ("x = a < b", "comparison", "a <= b"),
        ("x = a is None", "comparison", "a is not None"),
        ("x = a in b", "comparison", "a not in b"),
        ("x = a + b", "arithmetic", "a - b"),
        ("x = a // b", "arithmetic", "a * b"),
        ("x = a and b", "boolean", "(a) or (b)"),
        ("x = not a", "negation", "(a)"),
        ("x = 1 if a else 2", "negation", "(not (a))"),
        ("x = [c for c in a if b]", "negation", "(not (b))"),
        ("x = 7", "off by one", "8"),
        ("x = True", "constant", "False"),
        ("x = 'name'", "constant", "'namex'"),
        ("x = g(a, b, c=1)", "swapped arguments", "g(b, a, c=1)"),
        ("return a", "return None", "return None"),
        ("a.x = b", "dropped statement", "pass"),
        ("g(a)", "dropped statement", "pass"),
        ("raise ValueError('a text')", "dropped statement", "pass"),
        ("a += b", "dropped statement", "pass"),
    ],
)
def test_each_kind_is_made(statement: str, kind: str, after: str) -> None:
    assert (kind, after) in made(statement)


@pytest.mark.parametrize("statement", ["return None", "x: int = a", '"""A text."""', "x = 'two words'", "x = g(a, a)"])
def test_what_would_change_nothing_or_only_words_is_left_alone(statement: str) -> None:
    assert made(statement) == set()


def test_a_message_keeps_its_numbers_and_names() -> None:
    assert made("raise ValueError(f'{a + 1} is wrong')") == {("dropped statement", "pass")}
    assert made("assert a < 3, 'too large'") == set()


@pytest.mark.slow
def test_every_mutation_of_a_real_file_compiles_and_changes_it() -> None:
    source = Path(__file__).with_name("mutations.py").read_bytes()
    found = mutations("mutations.py", source)
    assert len(found) > 100
    for each in found:
        changed = each.apply(source)
        ast.parse(changed)
        assert changed != source and each.before == source[each.begin : each.end].decode()
        assert source.decode().splitlines()[each.line - 1] in each.diff(source)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    first, second = (Mutation("f.py", "f", "constant", number, 0, 1, "1", "2") for number in (1, 2))
    kept = Record(tmp_path / "deep" / "results.jsonl")
    kept.add(Result(first, SURVIVED, 1.0, 3))
    kept.add(Result(second, KILLED, 1.0, 3))
    kept.add(Result(first, KILLED, 2.0, 4))
    with (tmp_path / "deep" / "results.jsonl").open("a") as file:
        file.write('{"mutation": {"file"')
    assert Record(tmp_path / "deep" / "results.jsonl").results == kept.results
    assert [kept.results[each].alive for each in (first, second)] == [False, False]


def test_a_survivor_is_explained_by_its_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "EXPLAINED", tmp_path / "explained.toml")
    lines = ["[[survivor]]", 'file = "f.py"', 'scope = "f"', 'before = "1"', 'after = "2"', 'reason = "the same"']
    (tmp_path / "explained.toml").write_text("\n".join(lines))
    same = Mutation("f.py", "f", "constant", 7, 9, 10, "1", "2")
    other = Mutation("f.py", "g", "constant", 7, 9, 10, "1", "2")
    assert (explanation(same), explanation(other)) == ("the same", "")
