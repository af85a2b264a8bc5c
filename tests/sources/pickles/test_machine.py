"""The pickle machine builds what pickle builds, from every protocol, and nothing else."""

from __future__ import annotations

import collections
import pickle
import pickletools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.sources.pickles import COMMON, Encoded, FileSpan, Name, Record, read_pickle, records, span_bytes
from tests.sources.made import reader

PROTOCOLS = range(6)


def read(data: bytes, names=COMMON, **options):
    return read_pickle(reader(data), "test", names, **options).value


def plain(value, source: bytes):
    """A value with spans as the bytes that they are."""
    if isinstance(value, FileSpan | Encoded):
        return span_bytes(reader(source), value, "test")
    if isinstance(value, dict):
        return {key: plain(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item, source) for item in value)
    return value


keys = st.one_of(st.text(max_size=10), st.integers(-(2**63), 2**63), st.none(), st.booleans())
scalars = st.one_of(keys, st.floats(allow_nan=False), st.binary(max_size=40), st.integers(-(2**200), 2**200))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        st.sets(keys, max_size=5),
        st.frozensets(keys, max_size=5),
    ),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(values, st.sampled_from(PROTOCOLS))
def test_what_is_plain_comes_out_as_it_went_in(value, protocol):
    data = pickle.dumps(value, protocol)
    found = read_pickle(reader(b"before" + data + b"after"), "test", COMMON, begin=6)
    assert plain(found.value, b"before" + data) == value
    assert found.end == 6 + len(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_containers_of_the_standard_library(protocol):
    value = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(int, x=1),
        "counter": collections.Counter("aab"),
        "complex": 1 - 2j,
        "shared": [[1]] * 3,
    }
    found = read(pickle.dumps(value, protocol))
    assert found == value and list(found["ordered"]) == ["b", "a"]
    assert found["shared"][0] is found["shared"][2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_long_bytes_stay_in_the_file(protocol):
    data = bytes(range(256)) * 20
    stream = pickle.dumps({"long": data, "short": b"xyz"}, protocol)
    found = read(stream)
    assert not isinstance(found["long"], bytes) or protocol < 3
    assert plain(found, stream) == {"long": data, "short": b"xyz"}
    if protocol >= 3:
        at = found["long"]
        assert (at.data, stream[at.offset : at.offset + at.size]) == (None, data)


def test_a_long_text_stays_in_the_file_too():
    text = "é" * (1 << 20)
    stream = pickle.dumps([text], 4)
    (found,) = read(stream)
    assert found.text and stream[found.offset : found.offset + found.size].decode() == text


class Thing:
    size = 0


def test_a_named_class_is_a_record_of_what_it_was_given():
    thing = Thing()
    thing.size = 3
    found = read(pickle.dumps([thing]), {**COMMON, **records(__name__, "Thing")})[0]
    assert isinstance(found, Record)
    assert (found.name, found.fields) == (Name(__name__, "Thing"), {"size": 3})


def test_another_class_is_refused_by_its_name():
    with pytest.raises(Unsupported, match=r"names '.*test_machine\.Thing' at byte"):
        read(pickle.dumps(Thing()))


def test_a_name_that_may_only_stand_there_is_not_called():
    names = {("os", "system"): None}
    assert read(b"cos\nsystem\n.", names) == Name("os", "system")
    with pytest.raises(Damaged, match=r"'os\.system' is called"):
        read(b"cos\nsystem\n(S'true'\ntR.", names)


def test_persistent_ids_go_to_the_caller():
    stream = b"\x80\x02(X\x01\x00\x00\x00aK\x01tQ."
    assert read(stream, persistent=lambda token: ["got", token]) == ["got", ("a", 1)]
    with pytest.raises(Damaged, match="outside the pickle"):
        read(stream)


def test_every_operation_is_known_or_refused_on_purpose():
    from holdfast.sources.pickles.machine import _HANDLERS

    refused = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "STOP"}
    known = {code.name for code in pickletools.opcodes if ord(code.code) in _HANDLERS}
    assert known == {code.name for code in pickletools.opcodes} - refused


@pytest.mark.raises_nothing
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(PROTOCOLS), st.integers(0, 200), values)
def test_any_other_bytes_are_refused_or_read(noise, protocol, cut, value):
    good = pickle.dumps(value, protocol)
    for data in (noise, good[:cut], good[:cut] + noise, good[:cut] + noise + good[cut:]):
        try:
            read(data)
        except HoldfastError:
            continue


@pytest.mark.parametrize("key", [b"]", b"}", b"\x80\x04\x8f", b"K\x01K\x02\x86\x85"])
def test_what_cannot_be_a_key_is_damage(key):
    with pytest.raises(Damaged, match="cannot be a key"):
        read(b"}" + key + b"Ns.")


def test_numbers_that_could_be_made_to_collide_are_no_keys():
    with pytest.raises(Damaged, match="64 bits"):
        read(pickle.dumps({2**70: 1}))
    many = {(n,): n for n in range(5000)}
    with pytest.raises(Damaged, match="a tuple cannot be a key"):
        read(pickle.dumps(many))
    assert read(pickle.dumps({(1, "a"): 2})) == {(1, "a"): 2}
