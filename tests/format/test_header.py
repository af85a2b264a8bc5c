import json
import math
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.format.dtypes import dtype_named
from holdfast.format.header import TensorEntry, decode_header, encode_header, header_bytes

U8, F32 = dtype_named("uint8"), dtype_named("float32")


def text_of(fields):
    return json.dumps(fields, separators=(",", ":")).encode()


def packed(text):
    return struct.pack("<Q", len(text)) + text


def read(data):
    """What a reader does with a file: the length field, then the header."""
    size = header_bytes(data[:8], len(data), "file")
    return decode_header(data[:size], len(data), "file")


def tensor(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


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


def with_field(name, value):
    return packed(text_of({"a": tensor(0, 4) | {name: value}})) + b"abcd"


def without_field(name):
    fields = tensor(0, 4)
    del fields[name]
    return packed(text_of({"a": fields})) + b"abcd"


def with_text(text, data=b""):
    return packed(text if isinstance(text, bytes) else text.encode()) + data


A = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
TOO_LONG = limits.HEADER_BYTES + 1

HOSTILE = {
    # the file and its length field
    "empty file": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0),
    "length past the end": struct.pack("<Q", 100) + b"{}",
    "length one past the end": struct.pack("<Q", 3) + b"{}",
    "length over the limit": struct.pack("<Q", TOO_LONG) + b"{}",
    "length of all ones": b"\xff" * 8 + b"{}",
    "length of 2^63": struct.pack("<Q", 2**63) + b"{}",
    "length cuts the json": struct.pack("<Q", 5) + text_of({"a": tensor(0, 0)}),
    "length reaches into the data": struct.pack("<Q", len(A) + 3) + ("{" + A + "}abcd").encode(),
    "big-endian length": struct.pack(">Q", 2) + b"{}",
    # not one plain JSON object
    "leading space": with_text(" {}"),
    "leading newline": with_text("\n{}"),
    "byte order mark": with_text(b"\xef\xbb\xbf{}"),
    "array": with_text("[]"),
    "number": with_text("7"),
    "null": with_text("null"),
    "text": with_text('"{}"'),
    "two objects": with_text("{}{}"),
    "garbage after": with_text("{} x"),
    "zero padding": with_text(b"{}\0\0\0"),
    "not utf-8": with_text(b'{"\xff":1}'),
    "utf-16": with_text("{}".encode("utf-16-le")),
    "unclosed": with_text("{"),
    "single quotes": with_text("{'a':1}"),
    "trailing comma": with_text("{" + A + ",}", b"abcd"),
    "comment": with_text("{/**/}"),
    "deep arrays": with_text('{"a":' + "[" * 100_000),
    "deep objects": with_text('{"a":' * 100_000),
    "closed deep arrays": with_text('{"a":' + "[" * 3000 + "]" * 3000 + "}"),
    "NaN": with_text('{"a":NaN}'),
    "infinity": with_text('{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,4]}}', b"abcd"),
    "number of 5000 digits": with_text(
        '{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,4]}}', b"abcd"
    ),
    "duplicate key": with_text("{" + A + "," + A + "}", b"abcd"),
    "duplicate key by escape": with_text("{" + A + "," + A.replace('"a"', '"\\u0061"') + "}", b"abcd"),
    "duplicate field": with_text('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd"),
    "duplicate metadata": with_text('{"__metadata__":{},"__metadata__":{}}'),
    # metadata
    "metadata is a text": with_text('{"__metadata__":"pt"}'),
    "metadata is null": with_text('{"__metadata__":null}'),
    "metadata is a list": with_text('{"__metadata__":[]}'),
    "metadata holds a number": with_text('{"__metadata__":{"format":1}}'),
    "metadata holds an object": with_text('{"__metadata__":{"format":{}}}'),
    "metadata holds null": with_text('{"__metadata__":{"format":null}}'),
    "metadata is a tensor": packed(text_of({"__metadata__": tensor(0, 4)})) + b"abcd",
    # keys
    "empty key": packed(text_of({"": tensor(0, 4)})) + b"abcd",
    "key with NUL": packed(text_of({"a\0": tensor(0, 4)})) + b"abcd",
    "key with newline": packed(text_of({"a\nb": tensor(0, 4)})) + b"abcd",
    "key with escape": packed(text_of({"\x1b[2J": tensor(0, 4)})) + b"abcd",
    "key with C1 control": packed(text_of({"a\x9b": tensor(0, 4)})) + b"abcd",
    "key with delete": packed(text_of({"a\x7f": tensor(0, 4)})) + b"abcd",
    "key with lone surrogate": packed(text_of({"a\ud800": tensor(0, 4)})) + b"abcd",
    "key of 1025 bytes": packed(text_of({"k" * 1025: tensor(0, 4)})) + b"abcd",
    "key of a megabyte": packed(text_of({"k" * 2**20: tensor(0, 4)})) + b"abcd",
    # the tensor's fields
    "tensor is null": with_text('{"a":null}'),
    "tensor is a list": with_text('{"a":[]}'),
    "tensor is a number": with_text('{"a":4}', b"abcd"),
    "no fields": with_text('{"a":{}}'),
    "no dtype": without_field("dtype"),
    "no shape": without_field("shape"),
    "no offsets": without_field("data_offsets"),
    "unknown field": with_field("stride", [1]),
    "field in capitals": packed(text_of({"a": {"DTYPE": "U8", "shape": [4], "data_offsets": [0, 4]}})) + b"abcd",
    "unknown dtype": with_field("dtype", "U7"),
    "dtype in small letters": with_field("dtype", "u8"),
    "dtype is null": with_field("dtype", None),
    "dtype is a number": with_field("dtype", 8),
    "dtype is a list": with_field("dtype", ["U8"]),
    "dtype is an object": with_field("dtype", {}),
    "packed 4-bit dtype": with_field("dtype", "F4"),
    "shape is a number": with_field("shape", 4),
    "shape is null": with_field("shape", None),
    "shape is an object": with_field("shape", {"0": 4}),
    "shape is a text": with_field("shape", "4"),
    "shape holds a text": with_field("shape", ["4"]),
    "shape holds a float": with_field("shape", [4.0]),
    "shape holds true": with_field("shape", [True, 4]),
    "shape holds null": with_field("shape", [None]),
    "shape holds a list": with_field("shape", [[4]]),
    "shape holds a negative": with_field("shape", [-4]),
    "shape of two negatives": with_field("shape", [-2, -2]),
    "shape holds minus one": with_field("shape", [4, -1]),
    "shape of 2^63": with_field("shape", [2**63]),
    "shape of 2^64 + 4": with_field("shape", [2**64 + 4]),
    "product overflows to 4": with_field("shape", [2**32, 2**32, 4]),
    "product of 10^18s": with_field("shape", [10**18] * 60),
    "rank 65": with_field("shape", [1] * 64 + [4]),
    "rank 10^6": with_field("shape", [1] * 10**6),
    "float zero e0": with_text('{"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}}', b"abcd"),
    "shape too small": with_field("shape", [3]),
    "shape too large": with_field("shape", [5]),
    "dtype too wide": with_field("dtype", "U16"),
    # offsets
    "one offset": with_field("data_offsets", [4]),
    "three offsets": with_field("data_offsets", [0, 2, 4]),
    "no offset": with_field("data_offsets", []),
    "offsets are an object": with_field("data_offsets", {"0": 0, "1": 4}),
    "offsets are a text": with_field("data_offsets", "04"),
    "offsets are floats": with_field("data_offsets", [0.0, 4.0]),
    "offsets are booleans": packed(text_of({"a": tensor(0, 1) | {"data_offsets": [False, True]}})) + b"a",
    "negative begin": with_field("data_offsets", [-4, 0]),
    "begin after end": with_field("data_offsets", [4, 0]),
    "end past the file": packed(text_of({"a": tensor(0, 5)})) + b"abcd",
    "end of 2^63": with_field("data_offsets", [0, 2**63]),
    "offset of 10^400": with_field("data_offsets", [0, 10**400]),
    "offsets in the header": with_field("data_offsets", [-8, -4]),
    # how tensors follow each other
    "hole at the start": packed(text_of({"a": tensor(1, 4)})) + b"abcd",
    "hole in between": packed(text_of({"a": tensor(0, 1), "b": tensor(2, 4)})) + b"abcd",
    "hole at the end": packed(text_of({"a": tensor(0, 3)})) + b"abcd",
    "overlap by one": packed(text_of({"a": tensor(0, 3), "b": tensor(2, 4)})) + b"abcd",
    "the same bytes twice": packed(text_of({"a": tensor(0, 4), "b": tensor(0, 4)})) + b"abcd",
    "one inside the other": packed(text_of({"a": tensor(0, 4), "b": tensor(1, 2)})) + b"abcd",
    "empty tensor inside another": packed(text_of({"a": tensor(0, 4), "b": tensor(2, 2)})) + b"abcd",
    "empty tensor past the end": packed(text_of({"a": tensor(0, 4), "b": tensor(9, 9)})) + b"abcd",
    "data without tensors": packed(b"{}") + b"abcd",
    "tensors without data": packed(text_of({"a": tensor(0, 4)})),
    "one byte short": packed(text_of({"a": tensor(0, 4)})) + b"abc",
    "one byte more": packed(text_of({"a": tensor(0, 4)})) + b"abcde",
}


def test_the_file_that_the_hostile_ones_are_made_from_is_good():
    assert [entry.key for entry in read(with_text("{" + A + "}", b"abcd"))] == ["a"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_damage_and_is_refused_at_once(name):
    started = time.process_time()
    with pytest.raises(Damaged, match=r"^file: ") as caught:
        read(HOSTILE[name])
    assert time.process_time() - started < 1
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
        read(data)
    except Damaged:
        pass


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
