"""The fixture of the conformance suite, and helpers that its tests share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from holdfast.storage.base import Reader, Storage

ATTEMPT = ".attempt-1"


class Conformance:
    """Tests of one storage; subclasses provide the fixture `storage`."""

    @pytest.fixture
    def storage(self) -> Storage:
        """Return a new storage for each test, whose root was never written to."""
        raise NotImplementedError(f"{type(self).__name__} must define a fixture `storage`: the storage to test")


def publish(storage: Storage, folder: str, files: Mapping[str, bytes], aside: str = "") -> None:
    """Commit a folder of small files."""
    storage.begin(ATTEMPT)
    for name, data in files.items():
        storage.put(ATTEMPT, name, data)
    storage.publish(ATTEMPT, folder, aside)


def whole(reader: Reader) -> bytes:
    """Return all bytes of an open file and close it."""
    data = bytearray(reader.size)
    reader.read_into(0, [memoryview(data)])
    reader.close()
    return bytes(data)


def write_file(storage: Storage, name: str, parts: Mapping[int, bytes]) -> None:
    """Create a file of the attempt and write its parts, which cover it, in this order."""
    storage.create(ATTEMPT, name, sum(map(len, parts.values())))
    writer = storage.writer(ATTEMPT, name)
    try:
        for offset, data in parts.items():
            writer.write(offset, [memoryview(data)])
        writer.sync()
    finally:
        writer.close()
