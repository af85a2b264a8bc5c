"""Writers of an earlier start: the attempts they work on, and the wait until they are done.

A trainer may die while its writers go on. They hold locks on their arenas and on the mailbox of
the attempt. Writers on other hosts are recognized by their status notes, which change.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.core.errors import Damaged, NotFound, PeerFailed
from holdfast.core.host import host_identity
from holdfast.core.warnings import warn
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_owner import find_arenas
from holdfast.writer.mailbox import Mailbox, attempt_of, mail_folder

_ATTEMPT = re.compile(r"\.attempt-[0-9a-f]{16}")
_POLL_S = 0.05
_WARN_S = 5.0
_UNKNOWN_HOST_S = 4.0  # how long an attempt whose host is unknown may be silent


def wait_for_writers(
    storage: SharedStorage, run: str, deadline_s: float, silence_s: float, *, look_at_storage: bool
) -> set[str]:
    """Wait until no writer of an earlier start of this run is at work on this host.

    With `look_at_storage`, wait for saves in flight on other hosts too, until they are silent for `silence_s`.
    Returns the folders of attempts that nobody works in. Attempts that begin later are not among them.
    """
    end = time.monotonic() + deadline_s
    watch = AttemptWatch(storage, silence_s)
    warn_at = time.monotonic() + _WARN_S
    while True:
        orphans = [arena.path for arena in find_arenas(run) if arena.is_orphan()]
        alive = watch.any_alive() if look_at_storage else False
        if not orphans and not alive:
            return watch.dead
        if time.monotonic() > end:
            raise PeerFailed(
                f"{storage.name}: writers of an earlier start are still at work after {deadline_s:.0f} s: "
                f"{_describe_writers(storage, orphans, watch.living)}"
            )
        if time.monotonic() > warn_at:
            warn_at = end
            warn(
                f"{storage.name}: waiting up to {deadline_s:.0f} s for the writers of an earlier start, which finish "
                f"what it captured: {_describe_writers(storage, orphans, watch.living)}"
            )
        time.sleep(min(max(_POLL_S, storage.poll_s), silence_s))


def _describe_writers(storage: SharedStorage, arenas: Iterable[Path], folders: Iterable[str]) -> str:
    """Name the processes at work, and the command that ends only them."""
    folders = sorted(folders)
    held = [storage.root / folder for folder in folders] if isinstance(storage, LocalStorage) else []
    processes = holders([*arenas, *held])
    if processes:
        pids = " ".join(map(str, processes))
        return f"processes {pids} of this host; wait for them, or end them with `kill -9 {pids}`"
    hosts = {Mailbox(storage, attempt_of(folder) or "").host() or "a host that is not known" for folder in folders}
    where = f"host {', '.join(sorted(hosts))}" if folders else "another container of this host"
    return f"processes of {where}; wait for them, or end them there"


def holders(paths: Iterable[Path]) -> list[int]:
    """Return the other processes of this user and pid namespace that have one of the files or folders open."""
    wanted = set()
    for path in paths:
        with contextlib.suppress(OSError):  # a deleted file has no holder
            status = path.stat()
            wanted.add((status.st_dev, status.st_ino))
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(pid for pid in found if pid != os.getpid() and _has_open(pid, wanted))


def _has_open(pid: int, wanted: set[tuple[int, int]]) -> bool:
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # another user's process, or one that has ended
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            status = os.stat(descriptor.path)
            if (status.st_dev, status.st_ino) in wanted:
                return True
    return False


def dead_attempts(storage: SharedStorage, silence_s: float) -> set[str]:
    """Return the folders of attempts that nobody works in; for other hosts this takes up to `silence_s`."""
    watch = AttemptWatch(storage, silence_s)
    while True:
        watch.any_alive()
        if not watch.unsure:
            return {folder for folder in watch.dead if not is_in_use(storage, folder)}
        time.sleep(min(_POLL_S, silence_s))


class AttemptWatch:
    """Watches the attempts and mailboxes under a root, and finds out which are dead."""

    def __init__(self, storage: SharedStorage, silence_s: float) -> None:
        self._storage = storage
        self._silence_s = silence_s
        self._heard: dict[str, tuple[Any, float]] = {}
        self.dead: set[str] = set()
        self.living: set[str] = set()
        self.unsure: set[str] = set()  # attempts that may be in use on other hosts

    def any_alive(self) -> bool:
        """Return whether a save is in flight; False takes a few seconds of silence."""
        self.unsure.clear()
        hidden = set(self._storage.hidden())
        mailboxes = {folder for folder in hidden if attempt_of(folder)}
        living = {folder for folder in mailboxes if self._lives(folder)}
        unannounced = {
            folder for folder in hidden if _ATTEMPT.fullmatch(folder) and mail_folder(folder) not in mailboxes
        }
        self.dead = mailboxes - living | unannounced
        self.living = living
        return bool(living)

    def _lives(self, folder: str) -> bool:
        mailbox = Mailbox(self._storage, attempt_of(folder) or "")
        names = mailbox.names()
        if mail.OUTCOME in names and mailbox.outcome() is not None:
            return False
        if is_in_use(self._storage, folder):
            return True
        host = mailbox.host()
        if host == host_identity():
            return False  # a living coordinator on this host would hold the mailbox
        notes = {name: mailbox.read(name) for name in mail.statuses(names)}
        now = time.monotonic()
        known, since = self._heard.get(folder, (None, now))
        if folder not in self._heard or notes != known:
            heard_again = folder in self._heard
            self._heard[folder] = (notes, now)
            if not heard_again:
                self.unsure.add(folder)
            return True
        lives = now - since < (self._silence_s if host else min(_UNKNOWN_HOST_S, self._silence_s))
        if lives:
            self.unsure.add(folder)
        return lives


def is_in_use(storage: SharedStorage, folder: str) -> bool:
    """Return whether a process of this host works in a folder."""
    try:
        return storage.is_held(folder)
    except NotFound:
        return True  # deleted during the check, so another process is at work
    except Damaged:
        return False  # nobody can work in a folder that cannot be found
