"""Sweeping an object store: delete removed and unreferenced prefixes after a grace period for readers.

A sweep deletes the data of removed and replaced folders and of abandoned attempts. It also aborts
incomplete uploads, where the store can list them.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from holdfast.core.errors import StorageError
from holdfast.storage.objects.address import Address
from holdfast.storage.objects.calls import Calls, ListedObject, without_secrets
from holdfast.storage.objects.holds import HostHolds
from holdfast.storage.objects.uploads import abort_uploads

_CLOCK = ".removed/clock-"
_CHECKS = 60  # per grace period
_BATCH = 4  # prefixes deleted by one save or one start


class PrefixUsage(Protocol):
    """The storage, as far as a sweep depends on it."""

    def prefixes_in_use(self) -> set[str] | None:
        """Return the prefixes whose data is in use; None if that is currently unknown."""


class Sweeper:
    """Sweeps of one root. Ages are measured by the store's own clock."""

    def __init__(self, calls: Calls, holds: HostHolds, address: Address, usage: PrefixUsage) -> None:
        self._calls = calls
        self._holds = holds
        self._grace = timedelta(seconds=address.grace_s)
        self._address = address
        self._usage = usage
        self._next_check = 0.0

    def run(self) -> None:
        """Delete all unreferenced data whose grace period has passed."""
        removed, now = self._removed_and_now()
        unmarked = self._unmarked()
        used = self._used([*self._due(removed, now), *unmarked])
        if used is None:
            return
        for prefix in self._due(removed, now):
            self._finish_removal(prefix, used)
        for prefix in sorted(unmarked - used - removed.keys()):
            self._remove_old(prefix, now)
        self._abort_uploads(now - self._grace, used)

    def run_some(self, *, left: bool = False) -> None:
        """Delete some unreferenced data, with a bounded number of requests.

        Prefixes marked as removed are checked now and then, a few at a time, the oldest first. With
        `left`, also delete a few unreferenced prefixes that were not marked.
        """
        if time.monotonic() < self._next_check and not left:
            return
        self._next_check = time.monotonic() + self._grace.total_seconds() / _CHECKS
        unmarked = self._unmarked() if left else set()
        removed, now = self._removed_and_now() if left else (self._removed(), None)
        now = now or max(removed.values(), default=None)  # the store's time of the newest mark
        if now is None:
            return
        due = self._due(removed, now)[:_BATCH]
        used = self._used([*due, *unmarked])
        if used is None:
            return
        for prefix in due:
            self._finish_removal(prefix, used)
        unused = sorted(unmarked - used - removed.keys())
        for prefix in random.sample(unused, min(_BATCH, len(unused))):
            self._remove_old(prefix, now)

    def _removed(self) -> dict[str, datetime]:
        """Return the prefixes marked as removed, with the time of the mark."""
        marks = {item.key.removeprefix(".removed/"): item.modified for item in self._calls.list_objects(".removed")}
        return {prefix: since for prefix, since in marks.items() if not prefix.startswith("clock-")}

    def _removed_and_now(self) -> tuple[dict[str, datetime], datetime]:
        """Return the same, and the store's current time, which may differ from the host's clock."""
        clock = f"{_CLOCK}{secrets.token_hex(8)}"
        self._calls.put(clock, b"")
        marks = {item.key: item.modified for item in self._calls.list_objects(".removed")}
        self._calls.delete([clock])
        if clock not in marks:
            raise StorageError(f"{self._address.url}: a new object is missing from the listing")
        removed = {key.removeprefix(".removed/"): at for key, at in marks.items() if not key.startswith(_CLOCK)}
        return removed, marks[clock]

    def _now(self) -> datetime:
        return self._removed_and_now()[1]

    def _due(self, removed: Mapping[str, datetime], now: datetime) -> list[str]:
        """Return the prefixes whose grace period has passed, the oldest first."""
        return sorted(
            (prefix for prefix, since in removed.items() if now - since >= self._grace), key=removed.__getitem__
        )

    def _unmarked(self) -> set[str]:
        return {name for name in self._calls.prefixes() if name.startswith((".attempt-", ".mail-"))}

    def _used(self, candidates: Sequence[str]) -> set[str] | None:
        """Return the prefixes in use. Called after listing the candidates, so that new prefixes are not candidates."""
        return self._usage.prefixes_in_use() if candidates else set()

    def _finish_removal(self, prefix: str, used: set[str]) -> None:
        """Delete the data of a marked prefix, or delete the mark if a folder still points to the prefix."""
        if prefix in used:
            self._calls.delete([f".removed/{prefix}"])
        else:
            self._remove(prefix, self._calls.list_objects(prefix))

    def _remove_old(self, prefix: str, now: datetime) -> None:
        """Delete an unreferenced prefix, unless it was written to recently."""
        objects = self._calls.list_objects(prefix)
        if objects and now - max(item.modified for item in objects) >= self._grace:
            self._remove(prefix, objects)

    def _abort_uploads(self, before: datetime, used: set[str]) -> None:
        try:
            abort_uploads(self._address, before, used)
        except Exception as error:  # noqa: BLE001  (boto3's errors have no common base class)
            cause = without_secrets(error)
            raise StorageError(f"aborting old uploads under {self._address.url}: {cause}") from cause

    def _remove(self, prefix: str, objects: Iterable[ListedObject]) -> None:
        with self._holds.exclusive(prefix) as is_free:
            if is_free:
                # In one call: if it fails halfway, the remaining data is found as unmarked.
                self._calls.delete([*(item.key for item in objects), f".removed/{prefix}"])
