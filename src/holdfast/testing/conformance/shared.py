"""Conformance of shared storages, which other processes can open: addresses, identity, holds, sweeping."""

from __future__ import annotations

import pytest

from holdfast.core.errors import NotFound
from holdfast.storage import storage_at
from holdfast.storage.base import IdentifiedStorage, SharedStorage
from holdfast.testing.conformance.base import ATTEMPT, Conformance, publish


class SharedConformance(Conformance):
    """Writers of several processes work and communicate through the storage."""

    def test_it_is_shared(self, storage: SharedStorage) -> None:
        assert isinstance(storage, SharedStorage)
        assert 0 < storage.poll_s < 60

    def test_its_address_makes_the_same_storage(self, storage: SharedStorage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        other = storage_at(storage.address)
        assert isinstance(other, SharedStorage)
        assert other.address == storage.address
        assert other.read("step-1", "a", 1) == b"1"
        other.begin(".mail-1")
        other.note(".mail-1", "word", b"heard")
        assert storage.read(".mail-1", "word", 10) == b"heard"
        storage.discard(".mail-1")
        with pytest.raises(NotFound):
            other.read(".mail-1", "word", 10)

    def test_it_exists_once_something_is_written(self, storage: SharedStorage) -> None:
        assert storage.exists() is False
        publish(storage, "step-1", {"a": b"1"})
        assert storage.exists() is True

    def test_its_identity_is_made_once_and_is_no_folder(self, storage: SharedStorage) -> None:
        if not isinstance(storage, IdentifiedStorage):
            pytest.skip("a storage without identities: nothing is restored from memory for it")
        assert storage.identity(make=False) is None
        made = storage.identity(make=True)
        other = storage_at(storage.address)
        assert isinstance(other, IdentifiedStorage)
        assert made is not None and made == other.identity(make=True) == storage.identity(make=False)
        assert storage.folders() == storage.hidden() == []
        publish(storage, "step-1", {"a": b"1"})
        assert storage.folders() == ["step-1"] and storage.identity(make=True) == made

    def test_a_folder_is_held_until_it_is_let_go(self, storage: SharedStorage) -> None:
        storage.begin(ATTEMPT)
        assert storage.is_held(ATTEMPT) is False
        hold = storage.hold(ATTEMPT)
        assert storage.is_held(ATTEMPT) is True
        again = storage.hold(ATTEMPT)
        hold.release()
        assert storage.is_held(ATTEMPT) is True
        again.release()
        assert storage.is_held(ATTEMPT) is False

    def test_what_is_not_there_cannot_be_held(self, storage: SharedStorage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        for ask in (storage.hold, storage.is_held):
            with pytest.raises(NotFound):
                ask(".attempt-none")

    def test_a_held_folder_is_not_removed(self, storage: SharedStorage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        hold = storage.pin("step-1").hold()
        assert storage.remove("step-1") is False
        assert storage.read("step-1", "a", 1) == b"1"
        hold.release()
        assert storage.remove("step-1") is True

    def test_sweeping_takes_away_what_was_replaced_and_nothing_else(self, storage: SharedStorage) -> None:
        publish(storage, "step-1", {"a": b"old"})
        hold = storage.pin("step-1").hold()
        publish(storage, "step-1", {"a": b"newer"})
        storage.begin(ATTEMPT)
        storage.put(ATTEMPT, "a", b"going on")
        storage.sweep()
        hold.release()
        storage.sweep()
        assert storage.hidden() == [ATTEMPT]
        assert storage.read(ATTEMPT, "a", 100) == b"going on"
        assert storage.read("step-1", "a", 100) == b"newer"
