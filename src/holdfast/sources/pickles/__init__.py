"""`read_pickle`: read pickles without executing them; only plain values and inert records are built.

`read_pickle` takes the names that the file may contain, each with one of our own pure functions to
build its value. Byte strings stay in the file as spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.sources.pickles.bounds import check_traversal
from holdfast.sources.pickles.byte_windows import PickleStream
from holdfast.sources.pickles.common import COMMON, path_text
from holdfast.sources.pickles.machine import Machine, Persistent
from holdfast.sources.pickles.numpy_arrays import NUMPY, Array, array_of, is_array, is_scalar, scalar_value
from holdfast.sources.pickles.values import Builder, Encoded, FileSpan, Name, Names, Record, record_of, records
from holdfast.storage.base import Reader

__all__ = [
    "COMMON",
    "NUMPY",
    "Array",
    "Builder",
    "Encoded",
    "FileSpan",
    "Name",
    "Names",
    "Record",
    "Unpickled",
    "array_of",
    "is_array",
    "is_scalar",
    "path_text",
    "read_pickle",
    "record_of",
    "records",
    "scalar_value",
    "span_bytes",
]


@dataclass(frozen=True, slots=True)
class Unpickled:
    """The value of a pickle, and the offset of the byte after it."""

    value: Any
    end: int


def read_pickle(
    reader: Reader,
    where: str,
    names: Names,
    *,
    begin: int = 0,
    end: int | None = None,
    persistent: Persistent | None = None,
) -> Unpickled:
    """Read the pickle that begins at `begin`; span offsets count from the reader's first byte.

    `names` lists the names it may contain: COMMON, NUMPY and the reader's own. Raises Unsupported, with
    the name, for any other name, and Damaged for data that is not a pickle or exceeds the limits.
    """
    stream = PickleStream(reader, begin, reader.size if end is None else end, where)
    machine = Machine(stream, names, persistent)
    value = machine.run()
    check_traversal(value, machine.opcodes, where)
    return Unpickled(value, stream.position)


def span_bytes(
    reader: Reader, data: FileSpan | Encoded | bytes, where: str, limit_bytes: int = limits.HEADER_BYTES
) -> bytes:
    """Read the bytes of a byte string, up to a size limit."""
    if isinstance(data, bytes):
        return data
    span = data.text if isinstance(data, Encoded) else data
    if span.data is not None:
        return span.data
    if span.size > limit_bytes:
        raise Damaged(f"{where}: {span.size} bytes at byte {span.offset}, more than the limit of {limit_bytes}")
    raw = bytearray(span.size)
    reader.read_into(span.offset, [memoryview(raw)])
    if not isinstance(data, Encoded):
        return bytes(raw)
    try:
        return raw.decode().encode("latin-1")
    except UnicodeError:
        raise Damaged(f"{where}: the text at byte {span.offset} is not Latin-1") from None
