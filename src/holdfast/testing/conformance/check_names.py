"""Conformance of names: file names read from a checkpoint must never leave their folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.errors import Damaged
from holdfast.storage.base import Storage
from holdfast.testing.conformance.base import ATTEMPT, Conformance, publish

HOSTILE = ("", "..", "../a", "/etc/passwd", "a\0", "a\nb", "a/b/c", ".a", "a\\b", "n" * 300, "a/../b", "%2e%2e/a")


class NameConformance(Conformance):
    """Every call refuses a hostile file name before touching anything."""

    @pytest.mark.parametrize("name", HOSTILE)
    def test_a_hostile_file_name_never_reaches_the_storage(self, storage: Storage, name: str) -> None:
        publish(storage, "step-1", {"a": b"1"})
        storage.begin(ATTEMPT)
        calls: tuple[Callable[[], object], ...] = (
            lambda: storage.read("step-1", name, 1),
            lambda: storage.pin("step-1").read(name, 1),
            lambda: storage.pin("step-1").open(name),
            lambda: storage.take(ATTEMPT, name),
            lambda: storage.create(ATTEMPT, name, 1),
            lambda: storage.put(ATTEMPT, name, b"1"),
            lambda: storage.note(ATTEMPT, name, b"1"),
            lambda: storage.writer(ATTEMPT, name),
            lambda: storage.drop(ATTEMPT, name),
        )
        for call in calls:
            with pytest.raises(Damaged, match="not an allowed file name"):
                call()
        assert storage.files(ATTEMPT) == {}
