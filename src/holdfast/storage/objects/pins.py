"""Pins: snapshots of one folder in an object store; pointers from a manifest to the prefix of its data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged, NotFound
from holdfast.core.names import MANIFEST, check_file, is_plain
from holdfast.storage.objects.calls import Calls, VersionedObject
from holdfast.storage.objects.holds import HostHold, HostHolds
from holdfast.storage.objects.transfer import ObjectReader

_POINTER = "pointer"
_PREFIX = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def pointer_bytes(prefix: str) -> bytes:
    """Return a pointer, which replaces a manifest that does not name its attempt's prefix."""
    return json.dumps({"holdfast": _POINTER, "attempt": prefix}).encode()


def prefix_named(attempt: Any) -> str | None:
    """Return the data prefix named by a manifest's field "attempt"; None if it is not a valid prefix."""
    return attempt if isinstance(attempt, str) and _PREFIX.fullmatch(attempt) else None


@dataclass(frozen=True, slots=True)
class Pointer:
    """The prefix of a folder's data, and the manifest; None if the manifest is stored with the data."""

    prefix: str
    data: bytes | None

    @staticmethod
    def of(folder: str, manifest: VersionedObject) -> Pointer:
        """Return the pointer of a manifest. A manifest without a prefix is stored next to its data."""
        fields: Any = None
        try:
            fields = json.loads(manifest.data)
        except (ValueError, RecursionError):
            return Pointer(folder, manifest.data)  # damaged; its reader reports that
        attempt = prefix_named(fields.get("attempt") if isinstance(fields, dict) else None)
        if attempt is None:
            return Pointer(folder, manifest.data)
        return Pointer(attempt, None if fields.get("holdfast") == _POINTER else manifest.data)


class ObjectPin:
    """A snapshot of one folder."""

    def __init__(self, calls: Calls, holds: HostHolds, folder: str, pointer: Pointer) -> None:
        self._calls = calls
        self._holds = holds
        self._folder = folder
        self._pointer = pointer
        self._listed: dict[str, int] | None = None

    def files(self) -> dict[str, int]:
        prefix = f"{self._pointer.prefix}/"
        names = {item.key.removeprefix(prefix): item.size for item in self._calls.list_objects(self._pointer.prefix)}
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
        return self._calls.get(f"{self._pointer.prefix}/{name}", limit_bytes).data

    def open(self, name: str) -> ObjectReader:
        check_file(name, f"{self._calls.url}/{self._folder}")
        files = self.files() if self._listed is None else self._listed
        if name not in files:
            raise NotFound(f"{self._calls.url}/{self._folder} has no file {name}")
        return ObjectReader(self._calls, f"{self._pointer.prefix}/{name}", files[name], ahead=True)

    def hold(self) -> HostHold:
        hold = self._holds.take(self._pointer.prefix)
        if self._calls.has_objects(self._pointer.prefix):
            return hold
        hold.release()
        raise NotFound(f"holding {self._calls.url}/{self._folder}: the folder was removed")
