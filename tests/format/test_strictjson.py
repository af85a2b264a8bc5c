import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.format import strictjson
from tests.effort import at_most

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aé字"\\\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab$"), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_values_round_trip_and_the_text_is_a_fixed_point(value):
    data = strictjson.dumps(value)
    assert strictjson.loads(data, "w") == value
    assert strictjson.dumps(strictjson.loads(data, "w")) == data


def test_the_text_is_compact_utf8_and_keeps_the_order_of_keys():
    assert strictjson.dumps({"b": [1, 2.5], "a": "é"}) == '{"b":[1,2.5],"a":"é"}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_not_written(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        strictjson.dumps([value])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"nul", "not valid JSON"),
        (b"[1,]", "not valid JSON"),
        (b"[1] 2", "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'"\xff"', "not valid JSON"),
        (b'"\xed\xa0\x80"', "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), "not valid JSON"),
        (b'"a\nb"', "not valid JSON"),
        (b"NaN", "NaN is not JSON"),
        (b"[Infinity]", "Infinity is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b'{"a":1,"a":1}', "duplicate key 'a'"),
        (b'[{"x":{"b":1,"c":2,"b":3}}]', "duplicate key 'b'"),
        (b'{"a":1,"\\u0061":2}', "duplicate key 'a'"),
        (b"9" * 5000, "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 5000 + b"]" * 5000, "nested too deeply"),
    ],
)
def test_anything_but_strict_json_is_damage_and_names_the_file(data, reason):
    with at_most(1), pytest.raises(Damaged, match=r"^run/state\.json: ") as caught:
        strictjson.loads(data, "run/state.json")
    assert reason in str(caught.value)


def test_the_limit_is_checked_before_parsing():
    assert strictjson.loads(b"[1]", "w", limit_bytes=3) == [1]
    with pytest.raises(Damaged, match="4 bytes of JSON, more than the limit of 3"):
        strictjson.loads(b"[1,]", "w", limit_bytes=3)


@given(st.binary(max_size=60) | st.text('[]{}:,"01 ', max_size=12).map(str.encode))
def test_random_bytes_parse_as_json_does_or_are_damage(data):
    try:
        value = strictjson.loads(data, "w")
    except Damaged:
        return
    assert value == json.loads(data)


def test_more_lists_than_the_limit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(limits, "JSON_CONTAINERS", 3)
    assert strictjson.loads(b"[[],{}]", "w") == [[], {}]
    with pytest.raises(Damaged, match="4 lists and objects of JSON, more than the limit of 3"):
        strictjson.loads(b"[[],[],[]]", "w")
