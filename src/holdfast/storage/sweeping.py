"""Sweeping an object store: data that nothing points to any more goes, once readers had time to finish.

Swept are the data of removed and replaced folders, of attempts that were given up, and uploads
that were never completed, where the store lists them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Protocol

from holdfast.core.errors import StorageError
from holdfast.storage.address import Address
from holdfast.storage.calls import Calls, Listed, without_secrets
from holdfast.storage.holds import HostHolds
from holdfast.storage.uploads import abort_uploads

_CLOCK = ".removed/clock-"


class Root(Protocol):
    """What a sweep asks of the storage."""

    def prefixes_in_use(self) -> set[str] | None:
        """The prefixes whose data is wanted; None if that cannot be told just now."""


class Sweeper:
    """One sweep of a root. What it finds is judged by the store's own clock."""

    def __init__(self, calls: Calls, holds: HostHolds, address: Address, root: Root) -> None:
        self._calls = calls
        self._holds = holds
        self._grace = timedelta(seconds=address.grace_s)
        self._address = address
        self._root = root

    def run(self, *, removed_only: bool = False) -> None:
        """Look for what can go, and then at what is in use: in this order nothing new is among it.

        With `removed_only`, just what was removed or replaced on purpose: that is found in one listing.
        """
        buried = {item.key.removeprefix(".removed/"): item.modified for item in self._calls.listed(".removed")}
        buried = {prefix: since for prefix, since in buried.items() if not prefix.startswith("clock-")}
        names = [] if removed_only else self._calls.prefixes()
        loose = [name for name in names if name.startswith((".attempt-", ".mail-"))]
        if not buried and not loose:
            return
        now = self._now()
        old: dict[str, list[Listed]] = {}
        for prefix in sorted({*buried, *loose}):
            found = self._calls.listed(prefix)
            since = buried.get(prefix) or max((item.modified for item in found), default=now)
            if now - since >= self._grace:
                old[prefix] = found
        used = self._root.prefixes_in_use()
        if used is None:
            return
        for prefix, found in old.items():
            if prefix not in used:
                self._remove(prefix, found)
            elif prefix in buried:
                self._calls.delete([f".removed/{prefix}"])  # a folder of another name has the same data
        if not removed_only:
            self._abort_uploads(now - self._grace, used)

    def _abort_uploads(self, before: datetime, used: set[str]) -> None:
        try:
            abort_uploads(self._address, before, used)
        except Exception as error:  # noqa: BLE001  (boto3 has no root of its errors)
            said = without_secrets(error)
            raise StorageError(f"aborting old uploads under {self._address.url}: {said}") from said

    def _remove(self, prefix: str, found: Iterable[Listed]) -> None:
        with self._holds.alone(prefix) as alone:
            if alone:
                self._calls.delete([item.key for item in found])
                self._calls.delete([f".removed/{prefix}"])

    def _now(self) -> datetime:
        """The store's time: clocks of hosts need not agree with it."""
        clock = f"{_CLOCK}{secrets.token_hex(8)}"
        self._calls.put(clock, b"")
        now = next((item.modified for item in self._calls.listed(".removed") if item.key == clock), None)
        self._calls.delete([clock])
        if now is None:
            raise StorageError(f"{self._address.url}: what was written is not listed")
        return now
