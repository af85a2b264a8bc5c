"""Sweeping an object store: data that nothing points to any more goes, once readers had time to finish.

Swept are the data of removed and replaced folders, of attempts that were given up, and uploads
that were never completed, where the store lists them.
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
from holdfast.storage.objects.calls import Calls, Listed, without_secrets
from holdfast.storage.objects.holds import HostHolds
from holdfast.storage.objects.uploads import abort_uploads

_CLOCK = ".removed/clock-"
_LOOKS = 60  # in the time that readers are given
_SOME = 4  # prefixes that one save, or one start, deletes


class Root(Protocol):
    """What a sweep asks of the storage."""

    def prefixes_in_use(self) -> set[str] | None:
        """The prefixes whose data is wanted; None if that cannot be told just now."""


class Sweeper:
    """The sweeps of one root. What they find is judged by the store's own clock."""

    def __init__(self, calls: Calls, holds: HostHolds, address: Address, root: Root) -> None:
        self._calls = calls
        self._holds = holds
        self._grace = timedelta(seconds=address.grace_s)
        self._address = address
        self._root = root
        self._next_look = 0.0

    def run(self) -> None:
        """Delete everything that can go."""
        buried, now = self._buried_by_now()
        loose = self._loose()
        used = self._used([*self._due(buried, now), *loose])
        if used is None:
            return
        for prefix in self._due(buried, now):
            self._bring_to_end(prefix, used)
        for prefix in sorted(loose - used - buried.keys()):
            self._remove_old(prefix, now)
        self._abort_uploads(now - self._grace, used)

    def run_some(self, *, left: bool = False) -> None:
        """Delete some of what can go, with a bounded number of requests.

        What was removed on purpose is looked at now and then, a few at a time, the oldest first. With
        `left`, also a few of the prefixes that nothing points to.
        """
        if time.monotonic() < self._next_look and not left:
            return
        self._next_look = time.monotonic() + self._grace.total_seconds() / _LOOKS
        loose = self._loose() if left else set()
        buried, now = self._buried_by_now() if left else (self._buried(), None)
        now = now or max(buried.values(), default=None)  # of what this process has just removed
        if now is None:
            return
        due = self._due(buried, now)[:_SOME]
        used = self._used([*due, *loose])
        if used is None:
            return
        for prefix in due:
            self._bring_to_end(prefix, used)
        unused = sorted(loose - used - buried.keys())
        for prefix in random.sample(unused, min(_SOME, len(unused))):
            self._remove_old(prefix, now)

    def _buried(self) -> dict[str, datetime]:
        """What was removed or replaced on purpose, and when, in one listing."""
        found = {item.key.removeprefix(".removed/"): item.modified for item in self._calls.listed(".removed")}
        return {prefix: since for prefix, since in found.items() if not prefix.startswith("clock-")}

    def _buried_by_now(self) -> tuple[dict[str, datetime], datetime]:
        """The same, with the store's time: clocks of hosts need not agree with it."""
        clock = f"{_CLOCK}{secrets.token_hex(8)}"
        self._calls.put(clock, b"")
        found = {item.key: item.modified for item in self._calls.listed(".removed")}
        self._calls.delete([clock])
        if clock not in found:
            raise StorageError(f"{self._address.url}: what was written is not listed")
        buried = {key.removeprefix(".removed/"): at for key, at in found.items() if not key.startswith(_CLOCK)}
        return buried, found[clock]

    def _now(self) -> datetime:
        return self._buried_by_now()[1]

    def _due(self, buried: Mapping[str, datetime], now: datetime) -> list[str]:
        """Those that were buried long enough ago, the oldest first."""
        return sorted(
            (prefix for prefix, since in buried.items() if now - since >= self._grace), key=buried.__getitem__
        )

    def _loose(self) -> set[str]:
        return {name for name in self._calls.prefixes() if name.startswith((".attempt-", ".mail-"))}

    def _used(self, candidates: Sequence[str]) -> set[str] | None:
        """What is in use, looked at after the candidates: in this order nothing new is among them."""
        return self._root.prefixes_in_use() if candidates else set()

    def _bring_to_end(self, prefix: str, used: set[str]) -> None:
        """Delete what was buried, or dig it out again if a folder of another name has the same data."""
        if prefix in used:
            self._calls.delete([f".removed/{prefix}"])
        else:
            self._remove(prefix, self._calls.listed(prefix))

    def _remove_old(self, prefix: str, now: datetime) -> None:
        """Delete a prefix that nothing points to, unless somebody wrote to it lately."""
        found = self._calls.listed(prefix)
        if found and now - max(item.modified for item in found) >= self._grace:
            self._remove(prefix, found)

    def _abort_uploads(self, before: datetime, used: set[str]) -> None:
        try:
            abort_uploads(self._address, before, used)
        except Exception as error:  # noqa: BLE001  (boto3 has no root of its errors)
            said = without_secrets(error)
            raise StorageError(f"aborting old uploads under {self._address.url}: {said}") from said

    def _remove(self, prefix: str, found: Iterable[Listed]) -> None:
        with self._holds.alone(prefix) as alone:
            if alone:
                # Together: where a part of it fails, what is left of the data is found as loose.
                self._calls.delete([*(item.key for item in found), f".removed/{prefix}"])
