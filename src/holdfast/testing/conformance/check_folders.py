"""Conformance of folders: attempts are hidden; publish, replace, rename and remove are atomic."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.errors import NotFound, StorageError
from holdfast.core.names import MANIFEST
from holdfast.storage.base import Storage
from holdfast.testing.conformance.base import ATTEMPT, Conformance, publish

MISSING: tuple[Callable[[Storage], Any], ...] = (
    lambda storage: storage.files("none"),
    lambda storage: storage.pin("none"),
    lambda storage: storage.read("none", "a", 1),
    lambda storage: storage.read("step-1", "none", 1),
    lambda storage: storage.read("step-1", "none/a", 1),
    lambda storage: storage.pin("step-1").read("none", 1),
    lambda storage: storage.pin("step-1").open("none"),
    lambda storage: storage.take(".attempt-none", "a"),
    lambda storage: storage.create(".attempt-none", "a", 1),
    lambda storage: storage.create(".attempt-none", "ema/a", 1),
    lambda storage: storage.put(".attempt-none", "a", b""),
    lambda storage: storage.writer(".attempt-none", "a"),
    lambda storage: storage.drop(".attempt-none", "a"),
    lambda storage: storage.publish(".attempt-none", "step-2"),
    lambda storage: storage.publish(".attempt-none", "step-1"),
    lambda storage: storage.rename("none", "other"),
    lambda storage: storage.remove("none"),
)


class FolderConformance(Conformance):
    """Visible folders are committed and complete."""

    def test_it_is_a_storage_with_a_name(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert storage.name

    def test_a_new_root_has_no_folders(self, storage: Storage) -> None:
        assert storage.folders() == storage.hidden() == storage.entries("step-1") == []

    def test_an_attempt_is_hidden_until_it_is_published(self, storage: Storage) -> None:
        storage.begin(ATTEMPT)
        storage.put(ATTEMPT, "a", b"1")
        assert storage.folders() == []
        assert storage.hidden() == [ATTEMPT]
        storage.publish(ATTEMPT, "step-1")
        assert storage.folders() == ["step-1"]
        assert storage.hidden() == []
        with pytest.raises(NotFound):
            storage.files(ATTEMPT)

    def test_an_attempt_is_begun_once(self, storage: Storage) -> None:
        storage.begin(ATTEMPT)
        assert storage.files(ATTEMPT) == {}
        with pytest.raises(StorageError):
            storage.begin(ATTEMPT)

    def test_folders_are_sorted(self, storage: Storage) -> None:
        for folder in ("step-3", "step-1", "other", "step-2"):
            publish(storage, folder, {"a": b"1"})
        assert storage.folders() == ["other", "step-1", "step-2", "step-3"]

    def test_a_name_that_begins_like_another_is_another(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        publish(storage, "step-10", {"b": b"10"})
        assert storage.files("step-1") == {"a": 1}
        assert storage.remove("step-1")
        assert storage.read("step-10", "b", 2) == b"10"

    def test_publishing_replaces_an_older_folder_as_a_whole(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"old", "only-old": b"1"})
        publish(storage, "step-1", {"a": b"newer", "ema/b": b"2"})
        assert storage.folders() == ["step-1"]
        assert storage.files("step-1") == {"a": 5, "ema/b": 1}
        assert storage.read("step-1", "a", 10) == b"newer"
        with pytest.raises(NotFound):
            storage.files(ATTEMPT)

    def test_the_older_folder_can_be_set_aside(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"old"}, "aside-1")
        assert storage.folders() == ["step-1"]
        publish(storage, "step-1", {"a": b"newer"}, "aside-1")
        assert storage.folders() == ["aside-1", "step-1"]
        assert storage.read("aside-1", "a", 10) == b"old"
        assert storage.read("step-1", "a", 10) == b"newer"

    def test_an_attempts_name_can_be_used_again_once_it_is_published(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        publish(storage, "step-2", {"b": b"2"})
        assert storage.files("step-2") == {"b": 1}

    def test_entries_are_everything_at_any_depth(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"1", "ema/b": b"2"})
        assert [name for name in storage.entries("step-1") if name != "ema"] == ["a", "ema/b"]
        assert storage.entries("none") == []

    def test_a_folder_is_renamed_to_a_free_name_only(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"1", "ema/b": b"x"})
        publish(storage, "step-2", {"a": b"2"})
        with pytest.raises(StorageError):
            storage.rename("step-1", "step-2")
        assert storage.read("step-1", "a", 1) == b"1"
        assert storage.read("step-2", "a", 1) == b"2"
        storage.rename("step-1", "damaged-step-1")
        assert storage.folders() == ["damaged-step-1", "step-2"]
        assert storage.files("damaged-step-1") == {"a": 1, "ema/b": 1}
        with pytest.raises(NotFound):
            storage.pin("step-1")

    def test_a_removed_folder_is_gone_and_its_name_is_free(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        publish(storage, "step-2", {"a": b"2"})
        assert storage.remove("step-1") is True
        assert storage.folders() == ["step-2"]
        assert storage.entries("step-1") == []
        publish(storage, "step-1", {"b": b"again"})
        assert storage.files("step-1") == {"b": 5}

    def test_a_folder_is_renamed_or_removed_for_the_attempt_that_was_meant_only(self, storage: Storage) -> None:
        first, second = ".attempt-00000000000000aa", ".attempt-00000000000000bb"
        for attempt in (first, second):
            storage.begin(attempt)
            storage.put(attempt, MANIFEST, json.dumps({"attempt": attempt}).encode())
            storage.publish(attempt, "step-1")
        with pytest.raises(NotFound):
            storage.remove("step-1", first)
        with pytest.raises(NotFound):
            storage.rename("step-1", "other", first)
        assert storage.folders() == ["step-1"]
        storage.rename("step-1", "other", second)
        assert storage.folders() == ["other"]
        assert storage.remove("other", second) is True
        assert storage.folders() == []

    def test_discarding_removes_an_attempt_and_nothing_else(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a": b"1"})
        storage.begin(ATTEMPT)
        storage.put(ATTEMPT, "ema/b", b"2")
        storage.discard(ATTEMPT)
        with pytest.raises(NotFound):
            storage.files(ATTEMPT)
        assert storage.hidden() == []
        assert storage.read("step-1", "a", 1) == b"1"

    def test_discarding_what_is_not_there_is_no_error(self, storage: Storage) -> None:
        storage.discard(".attempt-none")

    @pytest.mark.parametrize("number", range(len(MISSING)))
    def test_what_is_missing_is_not_found(self, storage: Storage, number: int) -> None:
        publish(storage, "step-1", {"a": b"1"})
        with pytest.raises(NotFound):
            MISSING[number](storage)
        assert storage.folders() == ["step-1"]
        assert storage.read("step-1", "a", 1) == b"1"
