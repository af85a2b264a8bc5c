"""The suite finds storages that break a rule: each of these breaks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from holdfast.core.errors import NotFound
from holdfast.storage.base import Storage
from holdfast.storage.memory import MemoryFile, MemoryPin, MemoryStorage
from holdfast.testing.conformance import StorageConformance
from holdfast.testing.conformance.base import publish


class Unpinned(MemoryStorage):
    """A pin that looks again at each read."""

    def pin(self, folder: str) -> MemoryPin:
        storage = self
        first = super().pin(folder)

        class Looking(MemoryPin):
            def read(self, name: str, limit_bytes: int) -> bytes:
                return storage.read(folder, name, limit_bytes)

            def open(self, name: str) -> MemoryFile:
                return MemoryStorage.pin(storage, folder).open(name)

        return Looking(folder, first._contents)

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        return MemoryStorage.pin(self, folder).read(name, limit_bytes)


class Merging(MemoryStorage):
    """A publish that leaves files of the older folder."""

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        older = self._folders.get(folder, {})
        super().publish(attempt, folder, aside)
        self._folders[folder] = {**older, **self._folders[folder]}


class Overwriting(MemoryStorage):
    """A rename that takes the place of another folder."""

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        self._folders[name] = self._folder(folder)
        del self._folders[folder]


class Trusting(MemoryStorage):
    """Notes under any name."""

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        self._folder(folder)[name] = bytearray(data)


class Prefixed(MemoryStorage):
    """A remove that goes by how names begin, as object stores list."""

    def remove(self, folder: str, attempt: str = "") -> bool:
        self._folder(folder)
        self._folders = {name: files for name, files in self._folders.items() if not name.startswith(folder)}
        return True


BROKEN: tuple[tuple[type[MemoryStorage], str, Mapping[str, Any]], ...] = (
    (Unpinned, "test_a_pin_stays_what_it_was_after_a_rename", {}),
    (Unpinned, "test_a_pin_of_a_replaced_folder_never_reads_the_new_one", {}),
    (Unpinned, "test_a_pin_of_a_removed_folder_reads_what_it_was_or_nothing", {}),
    (Merging, "test_publishing_replaces_an_older_folder_as_a_whole", {}),
    (Overwriting, "test_a_folder_is_renamed_to_a_free_name_only", {}),
    (Trusting, "test_a_hostile_file_name_never_reaches_the_storage", {"name": "../a"}),
    (Prefixed, "test_a_name_that_begins_like_another_is_another", {}),
)


@pytest.mark.parametrize(("kind", "name", "options"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_broken_storage_does_not_pass(kind: type[MemoryStorage], name: str, options: Mapping[str, Any]) -> None:
    test: Callable[..., None] = getattr(StorageConformance(), name)
    test(MemoryStorage(), **options)
    with pytest.raises((AssertionError, pytest.fail.Exception, NotFound)):
        test(kind(), **options)


def test_without_a_storage_the_suite_says_what_it_needs() -> None:
    with pytest.raises(NotImplementedError, match="must define a fixture `storage`"):
        fixture: Any = StorageConformance.storage
        fixture.__wrapped__(StorageConformance())


def test_its_helper_publishes() -> None:
    storage: Storage = MemoryStorage()
    publish(storage, "step-1", {"a": b"1"})
    assert storage.folders() == ["step-1"]
