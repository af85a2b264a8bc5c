"""Read the directory of a zip archive strictly: uncompressed entries inside the file, without overlap.

Names never become paths. Compressed, encrypted, duplicate or overlapping entries are rejected.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.storage.base import Reader

_END = struct.Struct("<4s4H2LH")
_END64_AT = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_SMALL = 0xFFFFFFFF
_DIRECTORY_BYTES = 64 * limits.MIB
_ENTRIES = 400_000
_NAME_BYTES = 1000


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry: its name, the offset of its bytes in the file, and its size."""

    name: str
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class _Central:
    name: str
    header: int
    size: int


def is_zip(start: bytes) -> bool:
    """Return True if a file with this start is a zip archive."""
    return start.startswith(b"PK\x03\x04")


def read_zip(reader: Reader, where: str, begin: int = 0, end: int | None = None) -> dict[str, ZipEntry]:
    """Return the entries of the archive in bytes `begin` to `end` of a file, by name; offsets are in the file."""
    size = (reader.size if end is None else end) - begin
    directory, count, at = _directory(reader, where, begin, size)
    entries = sorted(_centrals(directory, count, where), key=lambda entry: entry.header)
    found: dict[str, ZipEntry] = {}
    stops = [entry.header for entry in entries[1:]] + [at]
    for entry, stop in zip(entries, stops, strict=True):
        data = _data_begin(reader, entry, begin, stop, where)
        if data + entry.size > stop:
            raise Damaged(f"{where}: the zip entry {entry.name[:80]!r} overlaps what follows it")
        if entry.name in found:
            raise Damaged(f"{where}: two zip entries are named {entry.name[:80]!r}")
        found[entry.name] = ZipEntry(entry.name, begin + data, entry.size)
    return found


def _read(reader: Reader, offset: int, size: int) -> bytes:
    data = bytearray(size)
    reader.read_into(offset, [memoryview(data)])
    return bytes(data)


def _directory(reader: Reader, where: str, begin: int, size: int) -> tuple[bytes, int, int]:
    """Return the central directory, its number of entries, and its offset in the archive."""
    if size < _END.size:
        raise Damaged(f"{where}: {size} bytes are too few for a zip archive")
    mark, *numbers, comment = _END.unpack(_read(reader, begin + size - _END.size, _END.size))
    if mark != b"PK\x05\x06" or comment:
        raise Damaged(f"{where}: a zip archive without its end record; the file may be truncated")
    disk, first, here, count, length, at = numbers
    if _SMALL in (length, at) or 0xFFFF in (count, here):
        here, count, length, at = _end64(reader, where, begin, size)
    elif disk or first:
        raise Unsupported(f"{where}: a multi-part zip archive")
    if here != count or at + length > size or length > _DIRECTORY_BYTES or count > min(_ENTRIES, length // 46):
        raise Damaged(f"{where}: a zip directory of {count} entries in {length} bytes at {at} does not fit the file")
    return _read(reader, begin + at, length), count, at


def _end64(reader: Reader, where: str, begin: int, size: int) -> tuple[int, int, int, int]:
    position = size - _END.size - _END64_AT.size
    if position < _END64.size:
        raise Damaged(f"{where}: a large zip archive without its end record")
    mark, _, at, _ = _END64_AT.unpack(_read(reader, begin + position, _END64_AT.size))
    if mark != b"PK\x06\x07" or at + _END64.size > position:
        raise Damaged(f"{where}: a large zip archive without its end record")
    mark, _, _, _, _, _, here, count, length, start = _END64.unpack(_read(reader, begin + at, _END64.size))
    if mark != b"PK\x06\x06":
        raise Damaged(f"{where}: a large zip archive without its end record")
    return here, count, length, start


def _centrals(directory: bytes, count: int, where: str) -> Iterator[_Central]:
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > len(directory):
            raise Damaged(f"{where}: the zip directory ends too early")
        fields = _CENTRAL.unpack_from(directory, position)
        mark, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
        name_at = position + _CENTRAL.size
        extra_at = name_at + name_bytes
        position = extra_at + extra_bytes + comment_bytes
        if mark != b"PK\x01\x02" or position > len(directory) or name_bytes > _NAME_BYTES:
            raise Damaged(f"{where}: a broken zip directory")
        name = _name(directory[name_at:extra_at], where)
        size, packed, header = _wide(directory[extra_at : extra_at + extra_bytes], size, packed, header, where)
        if method or flags & 1 or size != packed:
            what = "encrypted" if flags & 1 else "compressed"
            raise Unsupported(f"{where}: the zip entry {name[:80]!r} is {what}; torch.save stores entries uncompressed")
        yield _Central(name, header, size)


def _name(raw: bytes, where: str) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise Damaged(f"{where}: a zip entry whose name is not UTF-8") from None
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise Damaged(f"{where}: the zip entry name {name[:80]!r} leads out of the archive")
    return name


def _wide(extra: bytes, size: int, packed: int, header: int, where: str) -> tuple[int, int, int]:
    """Return the sizes and the offset, taken from the extra field if too large for the directory."""
    numbers: list[int] = []
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            raw = extra[position + 4 : position + 4 + length]
            numbers = list(struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
        position += 4 + length
    values = []
    for value in (size, packed, header):
        if value == _SMALL:
            if not numbers:
                raise Damaged(f"{where}: a zip entry of 4 GB or more without its size")
            value = numbers.pop(0)  # noqa: PLW2901  (the order in the field is that of the directory)
        values.append(value)
    return values[0], values[1], values[2]


def _data_begin(reader: Reader, entry: _Central, begin: int, stop: int, where: str) -> int:
    """Return the offset of an entry's bytes in the archive, from its local header."""
    if entry.header + _LOCAL.size > stop:
        raise Damaged(f"{where}: the zip entry {entry.name[:80]!r} overlaps another, or the directory")
    raw = _read(reader, begin + entry.header, min(_LOCAL.size + 4 * len(entry.name), stop - entry.header))
    fields = _LOCAL.unpack_from(raw)
    name = raw[_LOCAL.size : _LOCAL.size + fields[9]]
    if fields[0] != b"PK\x03\x04" or fields[3] or fields[2] & 1 or name != entry.name.encode():
        raise Damaged(f"{where}: the zip entry {entry.name[:80]!r} does not begin as the directory says")
    return int(entry.header + _LOCAL.size + fields[9] + fields[10])
