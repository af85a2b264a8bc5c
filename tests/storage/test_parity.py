"""Corners in which the storages must not differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made: Storage = MemoryStorage() if request.param == "memory" else LocalStorage(tmp_path / "r")
    made.begin(".a")
    return made


def test_an_attempt_or_file_is_made_once(storage: Storage) -> None:
    with pytest.raises(StorageError):
        storage.begin(".a")
    storage.put(".a", "f", b"x")
    with pytest.raises(StorageError):
        storage.create(".a", "f", 1)
    with pytest.raises(NotFound):
        storage.create(".none", "ema/f", 1)


def test_maps_are_exact(storage: Storage) -> None:
    storage.put(".a", "f", b"123")
    storage.put(".a", "e", b"")
    assert bytes(storage.take(".a", "f").map(1, 2)) == b"23"
    assert bytes(storage.take(".a", "f").map(0, 0)) == bytes(storage.take(".a", "e").map(0, 0)) == b""
    with pytest.raises(Damaged):
        storage.take(".a", "f").map(0, 4)


def test_a_write_beyond_the_end_leaves_zeros(storage: Storage) -> None:
    storage.create(".a", "h", 0)
    storage.writer(".a", "h").write(4, [memoryview(b"xy"), memoryview(np.ones((0, 2), np.uint8))])
    assert storage.read(".a", "h", 10) == b"\0\0\0\0xy"
