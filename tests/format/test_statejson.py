import datetime
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.format import statejson, strictjson

SCALARS = ["bool_", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
SCALARS += ["float16", "float32", "float64", "complex64", "complex128"]


def stored(value):
    """The value after a journey through the bytes of state.json."""
    return statejson.decode(strictjson.loads(strictjson.dumps(statejson.encode(value, "state")), "w"), "w")


def described(value):
    """A value with the types of all its parts, so that 1, 1.0 and True, or NaN and NaN, compare as they should."""
    kind = type(value).__name__
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, float):
        return kind, repr(value)
    if isinstance(value, complex):
        return kind, repr(value.real), repr(value.imag)
    if isinstance(value, datetime.datetime | datetime.time):
        return kind, value.isoformat(), str(value.tzinfo), value.fold
    if isinstance(value, deque):
        return kind, value.maxlen, [described(item) for item in value]
    if isinstance(value, list | tuple):
        return kind, [described(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(described(item)) for item in value)
    if isinstance(value, dict):
        return kind, [(described(key), described(item)) for key, item in value.items()]
    return kind, value


@st.composite
def numpy_scalars(draw):
    dtype = np.dtype(draw(st.sampled_from(SCALARS)))
    data = bytes([draw(st.integers(0, 1))]) if dtype.kind == "b" else draw(st.binary(min_size=16, max_size=16))
    return np.frombuffer(data[: dtype.itemsize], dtype=dtype)[0]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | TEXTS
    | st.just("$tuple")
    | st.binary(max_size=6)
    | numpy_scalars(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
OFFSETS = st.sampled_from([None, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), datetime.UTC])
TIMES = (
    st.datetimes(timezones=OFFSETS)
    | st.times(timezones=OFFSETS)
    | st.dates()
    | st.timedeltas()
    | st.sampled_from([Path("a/b"), Path(), Path("/"), Path("é")])
)
VALUES = st.recursive(
    HASHABLE | st.binary(max_size=6).map(bytearray) | TIMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS, inner, max_size=3)
        | st.dictionaries(TEXTS.map("$".__add__), inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(TEXTS, st.integers(), max_size=3).map(Counter)
        | st.lists(inner, max_size=3).map(deque)
        | st.builds(deque, st.lists(inner, max_size=3), st.integers(0, 4))
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=400)
@given(VALUES)
def test_any_value_comes_back_with_its_types(value):
    assert described(stored(value)) == described(value)


def _name(value):
    """The same in every process: two workers must collect the same tests, and sets are in the order of their hashes."""
    text = str(sorted(map(str, value))) if isinstance(value, (set, frozenset)) else str(value)
    return f"{type(value).__name__} {text[:20]!r}"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -0.0,
        1e308,
        5e-324,
        math.nan,
        math.inf,
        -math.inf,
        complex(math.nan, -math.inf),
        complex(-0.0, 0.0),
        2**4095,
        -(2**4095),
        "",
        "é字😀\n\0",
        b"",
        b"\x00\xff",
        bytearray(b"abc"),
        (),
        (1,),
        ([1, (2,)], {}),
        [],
        {},
        {"a": {"b": [None]}},
        {1: "int", "1": "text", None: 0, (1, 2): "tuple", b"k": 1},
        {True: 1, 2.5: 2},
        {math.nan: 1},
        {"$float": "nan"},
        {"$tuple": [1]},
        {"$": 1},
        {"$a": 1, "$b": 2},
        {"$a": {"$b": 1}},
        {"a": 1, "$b": 2},
        OrderedDict([("b", 1), ("a", 2)]),
        OrderedDict([(2, "x"), ("$y", 3)]),
        Counter({"a": 2, 3: 1}),
        Counter(),
        set(),
        {1, 2.5, "a", None, (1, 2)},
        frozenset({frozenset(), b"x"}),
        np.float32(np.nan),
        np.float16(1.5),
        np.bool_(True),
        np.uint64(2**64 - 1),
        np.int64(-(2**63)),
        np.complex64(1 - 2j),
        {"lr": np.float64(0.1), "steps": (np.int32(3),)},
    ],
    ids=_name,
)
def test_a_value_comes_back_with_its_types(value):
    assert described(stored(value)) == described(value)


@pytest.mark.parametrize("dtype", SCALARS)
def test_numpy_scalars_keep_their_dtype(dtype):
    value = np.dtype(dtype).type(1)
    assert stored(value).dtype == np.dtype(dtype)
    assert stored(value) == value


def test_ordinary_values_are_ordinary_json():
    value = {"epoch": 3, "lr": 0.1, "names": ["a", None, True]}
    assert statejson.encode(value, "state") == value


def test_the_order_of_a_set_does_not_change_its_text():
    names = [f"name-{number}" for number in range(50)]
    assert statejson.encode(set(names), "s")["$set"] == sorted(names)


class Color(IntEnum):
    RED = 1


@dataclass
class Point:
    x: int


def a_function():
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        a_function,
        Point,
        np.zeros(3),
        np.datetime64("2026-01-01"),
        np.str_("text"),
        np.bytes_(b"x"),
        range(3),
        memoryview(b"x"),
        iter([]),
        2**4096,
        Ellipsis,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_with_its_path(value):
    with pytest.raises(Unsupported, match=r"^loader\.workers\[1\]\.state: "):
        statejson.encode({"workers": [0, {"state": value}]}, "loader")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": object()}, "s.a: "),
        ([0, object()], "s[1]: "),
        ((object(),), "s[0]: "),
        ({1: object()}, "s[1]: "),
        ({"$x": object()}, "s['$x']: "),
        (OrderedDict(a=object()), "s['a']: "),
        ({frozenset({object()}): 1}, "s key "),
        ({object()}, "s{}: "),
        ({"a": [{"b": (1, object())}]}, "s.a[0].b[1]: "),
    ],
    ids=lambda value: str(value)[:12],
)
def test_the_path_leads_to_the_value(value, path):
    with pytest.raises(Unsupported) as caught:
        statejson.encode(value, "s")
    assert str(caught.value).startswith(path)


def test_the_type_is_named_and_what_to_use_instead():
    with pytest.raises(Unsupported, match=r"a value of type builtins\.range cannot be stored as JSON; use numbers"):
        statejson.encode(range(3), "s")


def test_a_value_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(Unsupported, match=r"^s(\[0\])+: nested deeper than 32, or contains itself"):
        statejson.encode(loop, "s")


def nested(depth):
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_is_stored_up_to_the_limit():
    assert stored(nested(32)) == nested(32)
    with pytest.raises(Unsupported, match="nested deeper"):
        statejson.encode(nested(33), "s")


def test_a_leaf_claims_values_at_save_and_makes_them_at_load():
    class Tensor:
        pass

    tensor = Tensor()

    def claim(value, path, keys):
        return {"$tensor": [path, list(keys)]} if value is tensor else None

    encoded = statejson.encode({"a": [tensor, 1]}, "loader", claim)
    assert encoded == {"a": [{"$tensor": ["loader.a[0]", ["a", 0]]}, 1]}
    made = statejson.decode(encoded, "w", lambda tag, content: (tag, content[0]))
    assert made == {"a": [("$tensor", "loader.a[0]"), 1]}


def test_an_unknown_tag_is_damage():
    with pytest.raises(Damaged, match=r"^run/state\.json: unknown tag '\$pickle'$"):
        statejson.decode({"a": [{"$pickle": "gASVKAAAAAAA"}]}, "run/state.json")


@pytest.mark.parametrize(
    "value",
    [
        {"$path": 1},
        {"$date": "2026-13-01"},
        {"$datetime": "yesterday"},
        {"$datetime": ["2026-01-01T00:00:00"]},
        {"$datetime": ["2026-01-01T00:00:00", "Europe/Berlin", 7]},
        {"$datetime": ["2026-01-01T00:00:00", "../../etc/passwd", 0]},
        {"$timedelta": [1, 2]},
        {"$timedelta": [10**12, 0, 0]},
        {"$deque": [1]},
        {"$deque": [-1, []]},
        {"$deque": ["a", []]},
        {"$enum": ["A"]},
        {"$dataclass": [1]},
        {"$namedtuple": None},
        {"$defaultdict": [[1]]},
        {"$dtype": 1},
        {"$float": "NaN"},
        {"$float": 1.0},
        {"$float": []},
        {"$float": None},
        {"$complex": [1]},
        {"$complex": [1, 2, 3]},
        {"$complex": 1},
        {"$complex": ["a", "b"]},
        {"$bytes": 5},
        {"$bytes": "é"},
        {"$bytes": "a"},
        {"$bytes": "YQ==\n"},
        {"$bytearray": None},
        {"$numpy": None},
        {"$numpy": []},
        {"$numpy": ["float32"]},
        {"$numpy": ["float32", "zz"]},
        {"$numpy": ["float32", "00"]},
        {"$numpy": ["float32", 5]},
        {"$numpy": [5, "00"]},
        {"$numpy": [["float32"], "00000000"]},
        {"$numpy": ["object", "0000000000000000"]},
        {"$numpy": ["void", "00"]},
        {"$numpy": ["no such dtype", "00"]},
        {"$tuple": 5},
        {"$tuple": None},
        {"$set": [[1]]},
        {"$set": [{}]},
        {"$frozenset": 7},
        {"$dict": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": [5]},
        {"$dict": 5},
        {"$OrderedDict": None},
        {"$Counter": [[{}, 1]]},
        {"$": 1},
        {"$object": "os.system"},
    ],
    ids=str,
)
def test_a_bad_tagged_value_is_damage_and_names_the_file(value):
    with pytest.raises(Damaged, match=r"^w: "):
        statejson.decode(value, "w")


def test_a_tag_beside_other_keys_is_an_ordinary_dict():
    assert statejson.decode({"$float": "nan", "b": 1}, "w") == {"$float": "nan", "b": 1}


@pytest.mark.parametrize(
    "value", [{"$complex": [10**400, 0]}, {"$numpy": ["float32", ""]}, {"$numpy": ["float32", "00" * 8]}]
)
def test_tagged_values_that_do_not_fit_are_damage(value):
    with pytest.raises(Damaged):
        statejson.decode(value, "w")


def test_text_that_is_not_unicode_is_refused_with_its_path():
    for value in ({"x": "\ud800"}, {"\ud800": 1}):
        with pytest.raises(Unsupported, match="note"):
            statejson.encode(value, "note")


def test_values_that_json_has_are_told_apart_from_those_it_has_not():
    value: dict[str, Any] = {
        "small": [0, -1, True, None, 1.5, "text", "", 2**61, -(2**61)],
        "odd": [float("nan"), float("inf"), 2**62, -(2**100), "ä", "\x00"],
        "nested": {"a": {"b": [(1, 2), {3: 4}, b"x"]}},
    }
    encoded = statejson.encode(value, "state")
    again = stored(value)
    assert again["small"] == value["small"] and [type(item) for item in again["small"]] == [
        type(item) for item in value["small"]
    ]
    assert str(again["odd"]) == str(value["odd"]) and again["nested"] == value["nested"]
    assert encoded["odd"][:2] == [{"$float": "nan"}, {"$float": "inf"}]


@pytest.mark.parametrize("bad", ["\ud800", 2**5000, object()])
@pytest.mark.parametrize("wrap", [lambda item: {"k": item}, lambda item: [item], lambda item: {"\ud800": item}])
def test_what_json_cannot_have_is_refused_wherever_it_is(bad, wrap):
    with pytest.raises(Unsupported, match="state"):
        statejson.encode({"inner": wrap(bad)}, "state")


def test_scalars_count_as_a_level_of_nesting():
    value: Any = 1
    for _ in range(limits.JSON_DEPTH // 4):
        value = {"k": value}
    statejson.encode(value, "state")
    with pytest.raises(Unsupported, match="nested deeper"):
        statejson.encode({"k": value}, "state")
