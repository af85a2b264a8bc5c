"""The header of a file and the index of a group: canonical when written, strict when read."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.format.dtypes import dtype_named
from holdfast.format.safetensors import (
    TensorEntry,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    header_bytes,
)
from tests.attacks.headers import HOSTILE, TOO_LONG, A, packed, tensor, text_of, with_field, with_text
from tests.effort import at_most

U8, F32 = dtype_named("uint8"), dtype_named("float32")


def read(data):
    """What a reader does with a file: the length field, then the header."""
    size = header_bytes(data[:8], len(data), "file")
    return decode_header(data[:size], len(data), "file")


def test_the_header_is_canonical_compact_and_padded_to_eight():
    header = encode_header([TensorEntry("b", F32, (2,), 0, 8), TensorEntry("a", U8, (3,), 8, 11)])
    text = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    )
    assert header == packed(text + b" " * (-len(text) % 8))
    assert len(header) % 8 == 0


def test_keys_are_written_as_utf8():
    assert '"ключ"'.encode() in encode_header([TensorEntry("ключ", U8, (), 0, 1)])


@st.composite
def tensor_lists(draw):
    keys = draw(st.lists(st.text("ab.0/é", min_size=1, max_size=5), unique=True, max_size=6))
    names = st.sampled_from(["bool", "uint8", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"])
    entries, position = [], 0
    for key in keys:
        dtype = dtype_named(draw(names))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
        size = math.prod(shape) * dtype.bytes
        entries.append(TensorEntry(key, dtype, shape, position, position + size))
        position += size
    return entries


@pytest.mark.slow
@given(tensor_lists())
def test_what_is_encoded_is_decoded(entries):
    header = encode_header(entries)
    data = header + b"x" * (entries[-1].end if entries else 0)
    found = read(data)
    assert sorted(found, key=lambda e: e.key) == sorted(entries, key=lambda e: e.key)
    assert [entry.begin for entry in found] == sorted(entry.begin for entry in entries)


def test_scalars_and_empty_tensors_are_read():
    entries = [
        TensorEntry("empty", F32, (0, 4), 0, 0),
        TensorEntry("scalar", F32, (), 0, 4),
        TensorEntry("last", U8, (2, 0), 4, 4),
    ]
    assert set(read(encode_header(entries) + b"abcd")) == set(entries)


def test_a_header_needs_no_metadata():
    assert read(packed(b"{}")) == ()


@pytest.mark.parametrize("rank", [0, 1, limits.TENSOR_RANK])
def test_ranks_up_to_the_limit_are_read(rank):
    (entry,) = read(packed(text_of({"a": tensor(0, 1, shape=[1] * rank)})) + b"x")
    assert entry.shape == (1,) * rank


def test_as_many_tensors_as_the_limit_allows_are_read(monkeypatch):
    monkeypatch.setattr(limits, "HEADER_TENSORS", 3)
    assert len(read(packed(text_of({key: tensor(0, 0) for key in "abc"})))) == 3
    with pytest.raises(Damaged, match="4 tensors, more than the limit of 3"):
        read(packed(text_of({key: tensor(0, 0) for key in "abcd"})))


def test_the_file_that_the_hostile_ones_are_made_from_is_good():
    assert [entry.key for entry in read(with_text("{" + A + "}", b"abcd"))] == ["a"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_damage_and_is_refused_at_once(name):
    with at_most(1), pytest.raises(Damaged, match=r"^file: ") as caught:
        read(HOSTILE[name])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 4000


def test_a_length_over_the_limit_is_refused_from_eight_bytes():
    with pytest.raises(Damaged, match="more than the limit"):
        header_bytes(struct.pack("<Q", TOO_LONG), 2**60, "file")


def test_a_header_as_long_as_the_limit_is_asked_for():
    prefix = struct.pack("<Q", limits.HEADER_BYTES)
    assert header_bytes(prefix, limits.HEADER_BYTES + 8, "file") == limits.HEADER_BYTES + 8


def test_a_hole_and_an_overlap_are_told_apart_with_key_and_offset():
    with pytest.raises(Damaged, match="a hole before 'b': begins at 2, expected 1"):
        read(HOSTILE["hole in between"])
    with pytest.raises(Damaged, match="an overlap before 'b': begins at 2, expected 3"):
        read(HOSTILE["overlap by one"])


GOOD = encode_header(
    [TensorEntry("layers.0.w", F32, (2, 2), 0, 16), TensorEntry("é", dtype_named("bfloat16"), (3,), 16, 22)]
)
GOOD_FILE = GOOD + bytes(22)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.lists(st.integers(0, len(GOOD) * 8 - 1), min_size=1, max_size=4, unique=True))
def test_flipped_bits_decode_to_a_consistent_header_or_are_damage(bits):
    data = bytearray(GOOD_FILE)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    try:
        entries = read(bytes(data))
    except Damaged:
        return
    assert sum(entry.end - entry.begin for entry in entries) == 22


@settings(max_examples=500)
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_replaced_bytes_decode_or_are_damage(at, new, dropped):
    data = GOOD_FILE[:at] + new + GOOD_FILE[at + dropped :]
    try:
        entries = read(data)
    except Damaged:
        return
    assert 0 <= sum(entry.end - entry.begin for entry in entries) <= len(data)


@pytest.mark.parametrize("size", range(len(GOOD_FILE)))
def test_a_truncated_file_is_damage(size):
    with pytest.raises(Damaged):
        read(GOOD_FILE[:size])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda x: st.lists(x, max_size=3)))
def test_any_json_in_place_of_a_field_is_damage_or_the_value_itself(value):
    for name in ("dtype", "shape", "data_offsets"):
        try:
            (entry,) = read(with_field(name, value))
        except Damaged:
            continue
        assert (entry.dtype, math.prod(entry.shape), entry.begin, entry.end) == (U8, 4, 0, 4)


FILE = "model-00001-of-00002.safetensors"
KEYS = st.text("abc.019é/", min_size=1, max_size=10)


def test_the_text_is_what_transformers_writes():
    weight_map = {"b": FILE, "a": FILE}
    index = {"metadata": {"total_size": 12}, "weight_map": weight_map}
    assert encode_index(weight_map, 12).decode() == json.dumps(index, indent=2, sort_keys=True) + "\n"


@given(st.dictionaries(KEYS, st.sampled_from([FILE, "model-00002-of-00002.safetensors", "ema/model.safetensors"])))
def test_a_weight_map_round_trips(weight_map):
    assert decode_index(encode_index(weight_map, 0), "w") == weight_map


def test_unknown_fields_of_other_writers_are_allowed():
    data = json.dumps({"metadata": {"total_size": 1, "format": "pt"}, "extra": [], "weight_map": {"a": FILE}})
    assert decode_index(data.encode(), "w") == {"a": FILE}


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../model.safetensors",
        "a/../../model.safetensors",
        "a/b/c.safetensors",
        "/etc/passwd",
        "a\0.safetensors",
        "a\nb",
        "a\\b",
        "..\\a",
        "%2e%2e/a",
        "C:a",
        ".hidden",
        "a b",
        "n" * 300,
        "a\x1b[31m",
        "a/",
        "\u2024\u2024/a",
    ],
)
def test_a_file_name_that_is_not_plain_is_damage(name):
    with pytest.raises(Damaged, match=r"^run/index: .* is not an allowed file name$"):
        decode_index(json.dumps({"weight_map": {"good": FILE, "a": name}}).encode(), "run/index")


@pytest.mark.parametrize("name", [None, 1, True, [FILE], {"file": FILE}])
def test_a_file_name_that_is_no_text_is_damage(name):
    with pytest.raises(Damaged, match="'a' is not mapped to a file name"):
        decode_index(json.dumps({"weight_map": {"a": name}}).encode(), "w")


@pytest.mark.parametrize("key", ["", "a\nb", "a\0", "\x1b[2J", "__metadata__", "k" * 1025, "a\x9b"])
def test_a_hostile_key_is_damage(key):
    with pytest.raises(Damaged, match=r"^w: the key ") as caught:
        decode_index(json.dumps({"weight_map": {key: FILE}}).encode(), "w")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"weight_map":null}',
        b'{"weight_map":[]}',
        b'{"weight_map":"a"}',
        b'{"weight_map":{"a":"b","a":"b"}}',
        b'{"weight_map":{}}x',
        b'{"weight_map":NaN}',
        b'{"weight_map":' + b'{"a":' * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_not_an_index_is_damage(data):
    with pytest.raises(Damaged, match=r"^w: "):
        decode_index(data, "w")


def test_half_of_a_surrogate_pair_is_damage():
    with pytest.raises(Damaged, match="not valid JSON"):
        decode_index(json.dumps({"weight_map": {"a\ud800": FILE}}).encode(), "w")
