"""Cleanup at the start of a run: wait for earlier writers, find dead attempts and arenas, delete them.

A trainer may die while its writers go on. They hold locks on their arenas and on the mailbox of
the attempt. Writers on other hosts are recognized by their status notes, which change.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from holdfast.checkpoint.catalog import committed_steps, left_steps
from holdfast.checkpoint.retention import unused_name
from holdfast.checkpoint.run_identity import older_run_id
from holdfast.checkpoint.shared_memory import find_files, unlink_file
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, PeerFailed
from holdfast.core.names import MANIFEST, abandoned_folder
from holdfast.core.ranks import host_identity
from holdfast.core.warnings import warn
from holdfast.format.manifest import decode_manifest
from holdfast.storage.base import SharedStorage, Tracked
from holdfast.storage.local import LocalStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_card import ArenaFile, card_path, find_arenas, is_held_file, read_cards
from holdfast.writer.mailbox import Mailbox, attempt_of, mail_folder

_ATTEMPT = re.compile(r"\.attempt-[0-9a-f]{16}")
_POLL_S = 0.05
_WARN_S = 5.0
_LOOKS_S = (0.0, 0.007, 0.013)  # pauses before looks at the files that processes have open
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
    """Return the other processes of this user and pid namespace that keep one of the files or folders open.

    Another rank of this start may have one open for a moment, to see whether it is held.
    """
    wanted = set()
    for path in paths:
        with contextlib.suppress(OSError):  # a deleted file has no holder
            status = path.stat()
            wanted.add((status.st_dev, status.st_ino))
    found = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()} - {os.getpid()}
    for pause_s in _LOOKS_S:
        time.sleep(pause_s)
        found = {pid for pid in found if _has_open(pid, wanted)}
    return sorted(found)


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
        """Return True if a save is in flight; False takes a few seconds of silence."""
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
    """Return True if a process of this host works in a folder."""
    try:
        return storage.is_held(folder)
    except NotFound:
        return True  # deleted during the check, so another process is at work
    except Damaged:
        return False  # nobody can work in a folder that cannot be found


def clean_storage(storage: SharedStorage, dead: Collection[str]) -> list[str]:
    """Delete those of the `dead` attempts that no process of this host holds; return their names."""
    deleted = []
    for folder in sorted(dead):
        attempt = attempt_of(folder)
        if not is_in_use(storage, folder):
            if attempt is not None:
                _discard(storage, attempt)
            _discard(storage, folder)
            deleted.append(attempt or folder)
    return deleted


def clean_dead_attempts(storage: SharedStorage, silence_s: float = 60.0) -> None:
    """Delete the attempts that crashed processes left, and the data of removed folders: each may be a whole model."""
    if storage.exists():
        clean_storage(storage, dead_attempts(storage, silence_s))
        sweep_removed(storage)


def sweep_removed(storage: SharedStorage) -> None:
    """Delete the data of removed folders whose deletion was interrupted, as far as possible."""
    with contextlib.suppress(HoldfastError):  # it only takes space; the next start tries again
        if isinstance(storage, Tracked):
            storage.sweep_some(left=True)
        else:
            storage.sweep()


def _discard(storage: SharedStorage, folder: str) -> None:
    """Delete a dead attempt, or set aside the abandoned step that its folder holds.

    A step is replaced by exchanging two folders. After a crash, the older step may still have the attempt's name.
    One that was only rewritten is at its place, and its copy here is deleted.
    """
    try:
        manifest = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
    except HoldfastError:
        storage.discard(folder)
        return
    left = (manifest.step or 0, manifest.identity)
    steps = committed_steps(storage)
    is_there = any(entry.manifest and (entry.step, entry.manifest.identity) == left for entry in steps)
    if manifest.attempt != folder and not is_there and left in left_steps(steps):
        storage.rename(folder, unused_name(storage, abandoned_folder(left[0])))
    else:
        storage.discard(folder)


def clean_arenas(run: str, keep: Callable[[str], bool] = lambda path: False) -> list[int | None]:
    """Delete the run's arenas that no process holds, except those to `keep`; return the steps that they held.

    An arena that held none counts as None.
    """
    deleted: list[int | None] = []
    for path in find_files(run):
        arena = str(path).removesuffix(".card")
        # The arenas of living trainers are usually held. Asking again would delay the first save of a run.
        if keep(arena) or is_held_file(Path(arena), once=_is_claimed(Path(arena))):
            continue
        cards = read_cards([Path(card_path(arena))])
        if cards[0].host == host_identity() if cards else not _is_claimed(Path(arena)):
            unlink_file(card_path(arena))
            unlink_file(arena)
            deleted.append(cards[0].step if cards else None)
    return deleted


def _is_claimed(path: Path) -> bool:
    arena = ArenaFile.at(path)
    return arena is not None and arena.is_claimed()


def older_arenas(storage: SharedStorage) -> list[str]:
    """Return the arenas that versions without run identities left on this host for a root of this path.

    Such arenas do not name their root, so they are neither restored nor deleted.
    """
    paths = find_files(older_run_id(storage))
    return [str(path) for path in paths if path.suffix != ".card" and not is_held_file(path)]
