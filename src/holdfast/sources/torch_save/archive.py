"""Parse a torch.save file, zip or legacy: its pickled value, and the offset and size of each storage.

Since torch 1.6 a file is a zip archive of uncompressed entries. Older files are consecutive pickles
followed by the storages.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.sources.pickles import read_pickle
from holdfast.sources.torch_save.torch_names import TORCH_NAMES, PickledStorage, storage_of
from holdfast.sources.torch_save.zip_directory import ZipEntry, is_zip, read_zip
from holdfast.storage.base import Reader

_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LEGACY_START = b"\x80\x02\x8a\n\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_PICKLE_BYTES = 1024 * limits.MIB


@dataclass(frozen=True, slots=True)
class Archive:
    """The value of a torch.save file. Its tensors are views of storages, given by key as offset and size.

    `pickle_end` is the byte after the pickle.
    """

    value: Any
    storages: Mapping[str, tuple[int, int]]
    pickle_end: int


def is_torch_file(start: bytes) -> bool:
    """Return True if a file with this start may be a torch.save file."""
    return is_zip(start) or start.startswith(_LEGACY_START)


def read_archive(reader: Reader, where: str, begin: int = 0, end: int | None = None) -> Archive:
    """Read what torch.save wrote to the bytes `begin` to `end` of a file, without executing it."""
    end = reader.size if end is None else end
    start = bytearray(min(4, end - begin))
    reader.read_into(begin, [memoryview(start)])
    if is_zip(bytes(start)):
        return _read_zipped(reader, where, begin, end)
    return _read_legacy(reader, where, begin, end)


def _read_zipped(reader: Reader, where: str, begin: int, end: int) -> Archive:
    entries = read_zip(reader, where, begin, end)
    top = next((name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")), None)
    if top is None or top.count("/") != 1:
        raise Unsupported(f"{where}: a zip archive without data.pkl: not a torch.save file")
    if f"{top}constants.pkl" in entries:
        raise Unsupported(f"{where}: a TorchScript program; save its state_dict() instead")
    order = entries.get(f"{top}byteorder")
    if order is not None and _small(reader, order, where) != b"little":
        raise Unsupported(f"{where}: big-endian tensors are not supported")
    data = entries[f"{top}data.pkl"]
    if data.size > _PICKLE_BYTES:
        raise Damaged(f"{where}: data.pkl has {data.size} bytes, more than the limit of {_PICKLE_BYTES}")
    storages: dict[str, tuple[int, int]] = {}

    def find(token: Any) -> PickledStorage:
        storage = _storage(token, where)
        entry = entries.get(f"{top}data/{storage.key}")
        if entry is None:
            raise Damaged(f"{where}: missing entry for the storage {storage.key[:80]!r}")
        _require_bytes(storage, entry.size, where)
        storages[storage.key] = (entry.begin, entry.size)
        return storage

    read = read_pickle(
        reader, f"{where}: data.pkl", TORCH_NAMES, begin=data.begin, end=data.begin + data.size, persistent=find
    )
    return Archive(read.value, storages, read.end)


def _small(reader: Reader, entry: ZipEntry, where: str) -> bytes:
    if entry.size > limits.KIB:
        raise Damaged(f"{where}: the zip entry {entry.name[:80]!r} has {entry.size} bytes")
    data = bytearray(entry.size)
    reader.read_into(entry.begin, [memoryview(data)])
    return bytes(data)


def _storage(token: Any, where: str) -> PickledStorage:
    try:
        return storage_of(token)
    except (TypeError, ValueError) as error:
        if isinstance(error, HoldfastError):
            raise
        raise Damaged(f"{where}: {error}") from None


def _item_bytes(storage: PickledStorage) -> int:
    if not storage.dtype:
        return 1
    dtype = dtype_named(storage.dtype)
    return dtype.bytes * (2 if dtype.pair else 1)


def _require_bytes(storage: PickledStorage, size: int, where: str) -> None:
    expected = storage.elements * _item_bytes(storage)
    if not 0 <= expected <= size:
        raise Damaged(f"{where}: the storage {storage.key[:80]!r} has {size} bytes, expected {expected}")


def _read_legacy(reader: Reader, where: str, begin: int, end: int) -> Archive:
    position = begin
    for expected in (_MAGIC, _LEGACY_PROTOCOL):
        read = read_pickle(reader, where, {}, begin=position, end=end)
        if read.value != expected:
            raise Unsupported(f"{where}: not a torch.save file")
        position = read.end
    system = read_pickle(reader, where, {}, begin=position, end=end)
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise Unsupported(f"{where}: big-endian tensors are not supported")
    found: dict[str, PickledStorage] = {}

    def find(token: Any) -> PickledStorage:
        storage = _storage(token, where)
        return found.setdefault(storage.key, storage)

    value = read_pickle(reader, where, TORCH_NAMES, begin=system.end, end=end, persistent=find)
    keys = read_pickle(reader, where, {}, begin=value.end, end=end)
    return Archive(value.value, _legacy_storages(reader, keys.value, found, keys.end, end, where), value.end)


def _legacy_storages(
    reader: Reader, keys: Any, found: Mapping[str, PickledStorage], position: int, end: int, where: str
) -> dict[str, tuple[int, int]]:
    """Locate consecutive storages: each is a count of elements followed by their bytes."""
    texts = isinstance(keys, list) and all(type(key) is str for key in keys)
    if not texts or len(keys) != len(found) or set(keys) != set(found):
        raise Damaged(f"{where}: the stored storages do not match those of the tensors")
    storages = {}
    for key in keys:
        storage = found[key]
        count = bytearray(8)
        if position + 8 > end:
            raise Damaged(f"{where}: the file ends before the storage {key[:80]!r}")
        reader.read_into(position, [memoryview(count)])
        size = storage.elements * _item_bytes(storage)
        if struct.unpack("<q", count)[0] != storage.elements or size < 0 or position + 8 + size > end:
            raise Damaged(
                f"{where}: the storage {key[:80]!r} at byte {position} does not have {storage.elements} elements"
            )
        storages[key] = (position + 8, size)
        position += 8 + size
    return storages
