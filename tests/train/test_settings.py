"""Settings are read strictly, and errors say what was meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pytest

import holdfast
from holdfast.train.settings import apply_sets, build, read_toml, write_toml


@dataclass(frozen=True)
class Inner:
    steps: int = 3
    rate: float = 0.1
    name: str = "a"
    fast: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Collected:
    files: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[Inner, ...] = ()
    limit: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Needs:
    path: str


def test_what_is_given_is_taken_and_the_rest_stays():
    found = build(Outer, {"inner": {"steps": 5, "rate": 2, "limit": 7}}, "")
    assert found == Outer(Inner(5, 2.0, limit=7))
    assert isinstance(found.inner.rate, float)


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ({"iner": {}}, r"no setting iner: did you mean inner\?"),
        ({"inner": {"step": 1}}, r"no setting inner.step: did you mean steps\?"),
        ({"inner": {"zzzz": 1}}, "choose one of steps, rate, name, fast, limit"),
        ({"inner": {"steps": 1.5}}, r"inner.steps = 1.5: it must be an integer"),
        ({"inner": {"steps": True}}, "inner.steps = True: it must be an integer"),
        ({"inner": {"fast": 1}}, "inner.fast = 1: it must be true or false"),
        ({"inner": {"limit": "x"}}, "inner.limit = 'x': it must be an integer"),
        ({"inner": {"rate": "x"}}, "inner.rate = 'x': it must be a number"),
        ({"inner": 3}, "inner must be a section"),
    ],
)
def test_what_is_wrong_is_refused(tables: dict[str, object], match: str):
    with pytest.raises(holdfast.InvalidArgument, match=match):
        build(Outer, tables, "")


def test_what_must_be_given_is_named():
    with pytest.raises(holdfast.InvalidArgument, match="needs is missing path"):
        build(Needs, {}, "needs")


def test_single_values_from_the_command_line():
    before = {"inner": {"steps": 1, "name": "b"}}
    after = apply_sets(before, ["inner.steps=9", "inner.name=runs/x=y", "other.rate=1e-3", "other.fast=true"])
    assert after == {"inner": {"steps": 9, "name": "runs/x=y"}, "other": {"rate": 1e-3, "fast": True}}
    assert before == {"inner": {"steps": 1, "name": "b"}}, "what was given is not changed"


@pytest.mark.parametrize("wrong", ["steps=3", "inner.steps", "=3", ".a=3", "inner.=3"])
def test_assignments_that_are_none(wrong: str):
    with pytest.raises(holdfast.InvalidArgument, match=r"section\.key=value"):
        apply_sets({}, [wrong])


def test_what_is_written_is_read_again():
    tables = {"a": {"text": 'q"\\\n\u00e9\x7f', "rate": 1e-05, "steps": -3, "big": 1e300, "on": True, "no": None}}
    tables["b"] = {"rate": 0.1}
    expected = {
        name: {key: value for key, value in table.items() if value is not None} for name, table in tables.items()
    }
    assert read_toml(write_toml(tables), "x") == expected


def test_broken_toml_says_where():
    with pytest.raises(holdfast.InvalidArgument, match=r"my.toml is not valid TOML.*line 2"):
        read_toml("[a]\nb = \n", "my.toml")


def test_arrays_and_tables_are_checked_by_item_and_written_inline():
    table = {"files": ["a", "b"], "names": {"x y": "z"}, "parts": [{"steps": 5}, {"rate": 2}], "limit": [1]}
    found = build(Collected, table, "c")
    assert found == Collected(("a", "b"), {"x y": "z"}, (Inner(5), Inner(rate=2.0)), (1,))
    assert build(Collected, read_toml(write_toml({"c": asdict(found)}), "x")["c"], "c") == found


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"files": "a"}, "c.files = 'a': it must be an array"),
        ({"files": ["a", 1]}, r"c.files\[1\] = 1: it must be a string"),
        ({"names": ["a"]}, r"c.names = \['a'\]: it must be a table"),
        ({"names": {"x": 1}}, "c.names.x = 1: it must be a string"),
        ({"parts": [{}, {"step": 1}]}, r"no setting c.parts\[1\].step: did you mean steps"),
    ],
)
def test_a_wrong_item_is_named(table: dict[str, object], match: str):
    with pytest.raises(holdfast.InvalidArgument, match=match):
        build(Collected, table, "c")
