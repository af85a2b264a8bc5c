"""Gates of a watched storage, for the tests of the writer: they count calls, hold them up or fail them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from holdfast.core.errors import StorageError
from holdfast.testing.watched import Gate

T = TypeVar("T")
DEADLINE_S = 20


class Count(Gate):
    """Counts the calls by kind."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def call(self, kind: str, where: str, work: Callable[[], T]) -> T:
        self.calls[kind] += 1
        return work()


class HoldUp(Gate):
    """Holds up every call until `opened` is set."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def call(self, kind: str, where: str, work: Callable[[], T]) -> T:
        assert self.opened.wait(DEADLINE_S)
        return work()


class NoListing(Gate):
    """Fails every listing of files while it is `down`."""

    down = False

    def call(self, kind: str, where: str, work: Callable[[], T]) -> T:
        if self.down and kind == "files":
            raise StorageError("the storage is down")
        return work()
