"""The suite that every storage must pass, run on each of ours."""

from pathlib import Path

import pytest

from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.testing.conformance import SharedStorageConformance, StorageConformance
from holdfast.testing.faults import faulty


class TestLocal(SharedStorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run")


class TestLocalWithoutMaps(SharedStorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run", mappable=False)


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()


class TestWatched(SharedStorageConformance):
    """A gate that lets all pass changes nothing."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return faulty(LocalStorage(tmp_path / "run"), None)
