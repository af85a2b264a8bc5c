"""Pins of object stores: a manifest that was read once says where the data is, and that never changes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged, NotFound
from holdfast.core.filenames import MANIFEST, check_file, is_plain
from holdfast.storage.objects.calls import Calls, Found
from holdfast.storage.objects.holds import HostHold, HostHolds
from holdfast.storage.objects.transfer import ObjectReader

_POINTER = "pointer"
_PREFIX = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def pointer_bytes(prefix: str) -> bytes:
    """What stands for a manifest where an attempt has none that names its prefix."""
    return json.dumps({"holdfast": _POINTER, "attempt": prefix}).encode()


def prefix_named(attempt: Any) -> str | None:
    """The prefix of the data that a manifest's attempt names; None if it names none."""
    return attempt if isinstance(attempt, str) and _PREFIX.fullmatch(attempt) else None


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a folder's data lies, and its manifest; None if that is among the data."""

    prefix: str
    data: bytes | None

    @staticmethod
    def of(folder: str, found: Found) -> Pointer:
        """What a manifest points to. One that points nowhere is in a folder that is its own data."""
        fields: Any = None
        try:
            fields = json.loads(found.data)
        except (ValueError, RecursionError):
            return Pointer(folder, found.data)  # damaged, as its reader will say
        attempt = prefix_named(fields.get("attempt") if isinstance(fields, dict) else None)
        if attempt is None:
            return Pointer(folder, found.data)
        return Pointer(attempt, None if fields.get("holdfast") == _POINTER else found.data)


class ObjectPin:
    """One folder as it was when it was pinned."""

    def __init__(self, calls: Calls, holds: HostHolds, folder: str, pointer: Pointer) -> None:
        self._calls = calls
        self._holds = holds
        self._folder = folder
        self._pointer = pointer
        self._listed: dict[str, int] | None = None

    def files(self) -> dict[str, int]:
        prefix = f"{self._pointer.prefix}/"
        names = {item.key.removeprefix(prefix): item.size for item in self._calls.listed(self._pointer.prefix)}
        files = {name: size for name, size in names.items() if is_plain(name)}
        if self._pointer.data is not None:
            files[MANIFEST] = len(self._pointer.data)
        self._listed = dict(sorted(files.items()))
        return dict(self._listed)

    def read(self, name: str, limit_bytes: int) -> bytes:
        check_file(name, f"{self._calls.url}/{self._folder}")
        if name == MANIFEST and self._pointer.data is not None:
            data = self._pointer.data
            if len(data) > limit_bytes:
                where = f"{self._calls.url}/{self._folder}/{name}"
                raise Damaged(f"{where}: {len(data)} bytes, more than the limit of {limit_bytes}")
            return data
        return self._calls.find(f"{self._pointer.prefix}/{name}", limit_bytes).data

    def open(self, name: str) -> ObjectReader:
        check_file(name, f"{self._calls.url}/{self._folder}")
        files = self.files() if self._listed is None else self._listed
        if name not in files:
            raise NotFound(f"{self._calls.url}/{self._folder} has no file {name}")
        return ObjectReader(self._calls, f"{self._pointer.prefix}/{name}", files[name], ahead=True)

    def hold(self) -> HostHold:
        hold = self._holds.take(self._pointer.prefix)
        if self._calls.any_under(self._pointer.prefix):
            return hold
        hold.release()
        raise NotFound(f"holding {self._calls.url}/{self._folder}: it was removed")
