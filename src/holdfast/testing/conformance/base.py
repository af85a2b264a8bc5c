"""The hook of the suite, and small steps that its tests share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from holdfast.storage.base import Reader, Storage

ATTEMPT = ".attempt-1"


class Conformance:
    """Tests of one storage; `storage` is the one fixture to give."""

    @pytest.fixture
    def storage(self) -> Storage:
        """A storage whose root was never written to, a new one for each test."""
        raise NotImplementedError(f"{type(self).__name__} must have a fixture `storage`: the one to test")


def publish(storage: Storage, folder: str, files: Mapping[str, bytes], aside: str = "") -> None:
    """Commit a folder of small files."""
    storage.begin(ATTEMPT)
    for name, data in files.items():
        storage.put(ATTEMPT, name, data)
    storage.publish(ATTEMPT, folder, aside)


def whole(reader: Reader) -> bytes:
    """All bytes of an open file, which is closed then."""
    data = bytearray(reader.size)
    reader.read_into(0, [memoryview(data)])
    reader.close()
    return bytes(data)


def write_file(storage: Storage, name: str, parts: Mapping[int, bytes]) -> None:
    """Create a file of the attempt and write its parts, which cover it, in the order given."""
    storage.create(ATTEMPT, name, sum(map(len, parts.values())))
    writer = storage.writer(ATTEMPT, name)
    try:
        for offset, data in parts.items():
            writer.write(offset, [memoryview(data)])
        writer.sync()
    finally:
        writer.close()
