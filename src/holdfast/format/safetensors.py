"""Safetensors headers, written canonically and read strictly, and the index that names the file of each key.

A file consists of 8 bytes of little-endian header length, the header's JSON padded with spaces
to a multiple of 8, and the tensors one after another without holes. The index names the file of
each key, in the format of transformers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.core.names import check_case_collisions, check_file, key_problem
from holdfast.format import strictjson
from holdfast.format.dtypes import DType, dtype_from_code

LENGTH_BYTES = 8
METADATA = {"format": "pt"}
_ELEMENTS = 2**60
_METADATA_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `begin` and `end` count bytes from the end of the header."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(entries: Iterable[TensorEntry]) -> bytes:
    """Return the first bytes of a file that holds `entries` in this order."""
    fields: dict[str, Any] = {"__metadata__": METADATA}
    for entry in entries:
        fields[entry.key] = {
            "dtype": entry.dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = strictjson.dumps(fields)
    text += b" " * (-len(text) % LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


def header_bytes(prefix: bytes, file_bytes: int, where: str) -> int:
    """Return the size of the header including its length field, from the first 8 bytes of a file."""
    if len(prefix) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise Damaged(f"{where}: {file_bytes} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", prefix[:LENGTH_BYTES])
    if length > limits.HEADER_BYTES:
        raise Damaged(f"{where}: the header claims {length} bytes, more than the limit of {limits.HEADER_BYTES}")
    if LENGTH_BYTES + length > file_bytes:
        raise Damaged(f"{where}: the header claims {length} bytes in a file of {file_bytes}")
    return int(LENGTH_BYTES + length)


def decode_header(data: bytes, file_bytes: int, where: str) -> tuple[TensorEntry, ...]:
    """Return the tensors of a file in byte order; raises Damaged for an invalid header."""
    text = data[LENGTH_BYTES:]
    if not text.startswith(b"{"):
        raise Damaged(f"{where}: the header does not begin with '{{'")
    # Counted before parsing: building a million small entries takes longer than refusing them.
    count = max(text.count(b'"dtype"'), text.count(b'":') // 4 - _METADATA_ENTRIES)
    if count > limits.HEADER_TENSORS:
        raise Damaged(f"{where}: {count} tensors, more than the limit of {limits.HEADER_TENSORS}")
    fields = strictjson.loads(text.rstrip(b" "), f"{where}: header", limit_bytes=limits.HEADER_BYTES)
    if not isinstance(fields, dict):
        raise Damaged(f"{where}: the header is not a JSON object")
    _check_metadata(fields.pop("__metadata__", {}), where)
    if len(fields) > limits.HEADER_TENSORS:
        raise Damaged(f"{where}: {len(fields)} tensors, more than the limit of {limits.HEADER_TENSORS}")
    entries = sorted((decode_entry(key, field, where) for key, field in fields.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            what = "a hole" if entry.begin > position else "an overlap"
            raise Damaged(f"{where}: {what} before {entry.key!r}: begins at {entry.begin}, expected {position}")
        position = entry.end
    if position != file_bytes - len(data):
        raise Damaged(f"{where}: tensors end at {position}, but the data has {file_bytes - len(data)} bytes")
    return tuple(entries)


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged(f"{where}: __metadata__ is not a map of strings")


def decode_entry(key: str, field: Any, where: str) -> TensorEntry:
    """Return one tensor of a header; raises Damaged if it is invalid."""
    problem = key_problem(key)
    if problem:
        raise Damaged(f"{where}: the key {key[:80]!r} {problem}")
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        raise Damaged(f"{where}: {key!r} must have dtype, shape and data_offsets and nothing else")
    dtype = dtype_from_code(field["dtype"]) if isinstance(field["dtype"], str) else None
    if dtype is None:
        raise Damaged(f"{where}: {key!r} has the unknown dtype {str(field['dtype'])[:40]!r}")
    shape = _sizes(field["shape"], f"{where}: the shape of {key!r}")
    offsets = _sizes(field["data_offsets"], f"{where}: the data_offsets of {key!r}")
    if math.prod(max(1, size) for size in shape) >= _ELEMENTS:
        raise Damaged(f"{where}: the shape {list(shape)} of {key!r} is too large")
    if len(offsets) != 2:
        raise Damaged(f"{where}: the data_offsets of {key!r} are not two numbers")
    begin, end = offsets
    expected = math.prod(shape) * dtype.bits // 8
    if end - begin != expected:
        raise Damaged(f"{where}: {key!r} spans {end - begin} bytes, but {dtype.code}{list(shape)} needs {expected}")
    return TensorEntry(key, dtype, shape, begin, end)


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) > limits.TENSOR_RANK:
        raise Damaged(f"{what} has {len(value)} numbers, more than the limit of {limits.TENSOR_RANK}")
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise Damaged(f"{what} is not a list of sizes")
    return tuple(value)


def encode_index(weight_map: Mapping[str, str], total_bytes: int, folder: str = "") -> bytes:
    """Encode an index: two spaces of indent, sorted keys, a newline at the end.

    An index in a subfolder (`folder` ends in a slash) names files relative to the subfolder.
    """
    names = {key: file.removeprefix(folder) for key, file in weight_map.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": names}
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def decode_index(data: bytes, where: str, folder: str = "") -> dict[str, str]:
    """Return the weight map of an index in `folder`; raises Damaged for invalid keys or file names."""
    index: Any = strictjson.loads(data, where)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise Damaged(f"{where}: has no weight_map")
    for key, name in weight_map.items():
        problem = key_problem(key)
        if problem:
            raise Damaged(f"{where}: the key {key[:80]!r} {problem}")
        if not isinstance(name, str):
            raise Damaged(f"{where}: {key!r} is not mapped to a file name")
        check_file(name, where)
    check_case_collisions(set(weight_map.values()), where)
    return {key: folder + name for key, name in weight_map.items()}


def require_indexed(weight_map: Mapping[str, str], held: Mapping[str, Container[str]], where: str) -> None:
    """Raise Damaged if an index names a key that its file lacks; `held` has the keys of each file."""
    for key, name in weight_map.items():
        if key not in held[name]:
            raise Damaged(f"{where}: the index lists {key!r} in {name}, which has no such key")
