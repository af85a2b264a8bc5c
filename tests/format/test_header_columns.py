"""Headers read as columns are what `decode_header` reads; whatever it refuses, or reads differently, is not taken."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Damaged
from holdfast.format.dtypes import dtype_named
from holdfast.format.header_columns import scan_header
from holdfast.format.safetensors import TensorEntry, decode_header, encode_header


def header_of(*tensors):
    position, entries = 0, []
    for key, dtype, shape in tensors:
        size = dtype_named(dtype).bits // 8
        for length in shape:
            size *= length
        entries.append(TensorEntry(key, dtype_named(dtype), shape, position, position + size))
        position += size
    header = encode_header(entries)
    return header, len(header) + position


def rows(columns):
    found = []
    for at, key in enumerate(columns.keys):
        dtype, shape = columns.kind_of[columns.kinds[at]]
        found.append(TensorEntry(key, dtype, shape, columns.begins[at], columns.ends[at]))
    return found


KEYS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029"), min_size=1, max_size=12
)
TENSORS = st.lists(
    st.tuples(
        KEYS.filter(lambda key: key != "__metadata__"),
        st.sampled_from(["float32", "bfloat16", "uint8", "int64"]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=8,
    unique_by=lambda tensor: tensor[0],
)


@given(TENSORS)
def test_they_are_the_entries_of_the_header(tensors):
    data, size = header_of(*tensors)
    columns = scan_header(data, size)
    if columns is None:  # no tensors, or a key with an escape
        assert not tensors or any(set(key) & set('"\\') for key, _, _ in tensors)
        return
    assert sorted(rows(columns), key=lambda e: (e.begin, e.end)) == list(decode_header(data, size, "x"))


def changed(old, new):
    data, size = header_of(("a", "float32", (2, 3)), ("b", "float32", (4,)))
    text = data[8:].decode().rstrip()
    assert old in text
    text = text.replace(old, new, 1)
    return struct.pack("<Q", len(text)) + text.encode(), size - len(data) + 8 + len(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"b"', '"a"'),
        ("[0,24]", "[0,20]"),
        ("[0,24]", "[1,25]"),
        ("[24,40]", "[20,36]"),
        ("[24,40]", "[32,48]"),
        ("[2,3]", "[2,4]"),
        ("[2,3]", "[2,,3]"),
        ("[2,3]", "[02,3]"),
        ("[0,24]", "[00,24]"),
        ("[2,3]", "[-2,-3]"),
        ('"F32"', '"F33"'),
        ('"a"', '"\x1f"'),
        ('"a"', '"\u2028"'),
        ('"a"', '"__metadata__"'),
        ('"a"', '""'),
        ('"a"', '"' + "k" * 1025 + '"'),
        ('"a"', '"' + "\u00e9" * 600 + '"'),
        ("}}", "},}"),
        ("}}", "}}}"),
        ("}}", "}"),
        ('"dtype"', '"dtypes"'),
        ('"shape":[2,3],', ""),
        ("[2,3]", "[" + "1," * 70 + "6]"),
    ],
)
def test_what_is_refused_is_not_taken(old, new):
    data, size = changed(old, new)
    with pytest.raises(Damaged):
        decode_header(data, size, "x")
    assert scan_header(data, size) is None


@pytest.mark.parametrize(("old", "new"), [('"a"', '"\\u0061"'), ("[0,24]", "[0, 24]"), (":{", ": {")])
def test_other_forms_are_left_to_the_decoder(old, new):
    data, size = changed(old, new)
    assert len(decode_header(data, size, "x")) == 2
    assert scan_header(data, size) is None


def test_metadata_of_other_writers_is_passed_over():
    data, _ = header_of(("a", "float32", (2,)))
    text = (
        data[8:].decode().rstrip().replace('{"format":"pt"}', json.dumps({"a": "b", "c": "d"}, separators=(",", ":")))
    )
    data = struct.pack("<Q", len(text)) + text.encode()
    assert rows(scan_header(data, len(data) + 8))[0].key == "a"
