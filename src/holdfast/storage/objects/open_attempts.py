"""Open attempts of an object store: a note `.open/<attempt>` names the prefix of the attempt's data.

The note exists while the attempt is being written. Mailboxes and tags are open attempts, too.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.names import is_plain
from holdfast.storage.objects.calls import Calls, ConditionFailed

OPEN = ".open"
_UNIQUE = re.compile(r"\.attempt-[0-9a-f]{16}")
_NOTE_BYTES = 64 * 1024


class OpenAttempts:
    """The open attempts of one root."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._prefixes: dict[str, str] = {}
        self._own: set[str] = set()  # attempts that this process has begun
        self._tags: dict[str, tuple[str, str]] = {}  # by attempt: the etag of its note, and its prefix

    def names(self) -> list[str]:
        """Return the names of all open attempts."""
        return sorted(item.key.removeprefix(f"{OPEN}/") for item in self._calls.list_objects(OPEN))

    def begin(self, attempt: str) -> None:
        """Open an attempt. Raises StorageError if it is already open."""
        # Data never moves, and a pin may still read it. A name that may recur gets a new prefix.
        unique = _UNIQUE.fullmatch(attempt) and not self._calls.has_objects(attempt)
        prefix = attempt if unique else f"{attempt}-{secrets.token_hex(4)}"
        note = json.dumps({"data": prefix, "nonce": secrets.token_hex(8)}).encode()
        try:
            self._calls.create(f"{OPEN}/{attempt}", note)
        except ConditionFailed:
            raise StorageError(f"creating {self._calls.url}/{attempt}: it already exists") from None
        self._prefixes[attempt] = prefix
        self._own.add(attempt)

    def is_own(self, attempt: str) -> bool:
        """Return True if this process has begun the attempt."""
        return attempt in self._own

    def is_open(self, attempt: str) -> bool:
        """Return True if the attempt is still open in the store."""
        return self._calls.exists(f"{OPEN}/{attempt}")

    def cached_prefix(self, attempt: str) -> str | None:
        """Return the data prefix of an attempt if this process knows it, without a request."""
        return self._prefixes.get(attempt)

    def prefix(self, attempt: str, *, fresh: bool = False) -> str:
        """Return the data prefix of an open attempt. Raises NotFound if the attempt is not open."""
        if fresh or attempt not in self._prefixes:
            self._prefixes.pop(attempt, None)
            try:
                note = self._calls.get(f"{OPEN}/{attempt}", _NOTE_BYTES)
            except NotFound:
                raise NotFound(f"{self._calls.url} has no folder {attempt}") from None
            try:
                prefix = str(json.loads(note.data)["data"])
            except (ValueError, KeyError, TypeError):
                raise Damaged(f"{self._calls.url}/{OPEN}/{attempt} does not name the prefix of its data") from None
            if not prefix.startswith(attempt) or not is_plain(prefix.lstrip(".")) or "/" in prefix:
                raise Damaged(f"{self._calls.url}/{OPEN}/{attempt} points to {prefix[:80]!r}")
            self._prefixes[attempt] = prefix
        return self._prefixes[attempt]

    def prefixes(self) -> set[str]:
        """Return the data prefixes of all open attempts. A note with an unchanged etag is not read again."""
        prefixes = set()
        for item in self._calls.list_objects(OPEN):
            attempt = item.key.removeprefix(f"{OPEN}/")
            known = self._tags.get(attempt)
            with contextlib.suppress(NotFound):
                prefix = known[1] if known and item.tag and known[0] == item.tag else self.prefix(attempt, fresh=True)
                prefixes.add(prefix)
                self._tags[attempt] = (item.tag, prefix)
        return prefixes

    def close(self, attempt: str, *keys: str) -> None:
        """Delete the note of an attempt, and further objects in the same request."""
        self._prefixes.pop(attempt, None)
        self._own.discard(attempt)
        self._tags.pop(attempt, None)
        self._calls.delete([f"{OPEN}/{attempt}", *keys])
