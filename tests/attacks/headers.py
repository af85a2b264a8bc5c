"""Hostile safetensors headers, each a whole file that no reader may take."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from holdfast.core import limits
from tests.attacks.attack import Attack


def text_of(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def packed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def with_field(name: str, value: Any) -> bytes:
    return packed(text_of({"a": tensor(0, 4) | {name: value}})) + b"abcd"


def without_field(name: str) -> bytes:
    fields = tensor(0, 4)
    del fields[name]
    return packed(text_of({"a": fields})) + b"abcd"


def with_text(text: bytes | str, data: bytes = b"") -> bytes:
    return packed(text if isinstance(text, bytes) else text.encode()) + data


A = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
TOO_LONG = limits.HEADER_BYTES + 1

HOSTILE: dict[str, bytes] = {
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


def _attack(name: str, data: bytes) -> Attack:
    def plant(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(data)

    return Attack(name, plant, on="foreign")


ATTACKS = tuple(_attack(name, data) for name, data in HOSTILE.items())
