"""Starting a run: wait for the writers of the run before, and clean what nobody holds.

A trainer may have died while its writers go on. They hold locks on their arenas and on the
mailbox of the attempt; those on other hosts are seen by their status notes, which change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.catalog import committed_steps, left_steps
from holdfast.checkpoint.retention import unused_name
from holdfast.checkpoint.run_identity import older_run_id
from holdfast.checkpoint.shared_memory import find_files, has_owner, is_held, unlink_file
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, PeerFailed
from holdfast.core.host import host_identity
from holdfast.core.warnings import warn
from holdfast.format.manifest import decode_manifest
from holdfast.format.names import MANIFEST, abandoned_folder
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_card import Card, card_path, read_cards
from holdfast.writer.mailbox import Mailbox, attempt_of, mail_folder
from holdfast.writer.processes import Process, began, holders

_ATTEMPT = re.compile(r"\.attempt-[0-9a-f]{16}")
_ARENA = re.compile(
    r"holdfast-[0-9a-f]{32}-[0-9]+-(?P<trainer>[0-9]+)-(?P<began>[0-9]+)-(?P<space>[0-9]+)-[0-9a-f]{32}"
)
_POLL_S = 0.05
_NOTICE_S = 5.0
_UNKNOWN_S = 4.0  # how long an attempt may be silent that has not said which host it is on
_YOUNG_S = 60.0  # how long a process of another container may take from making an arena to holding it


def arena_prefix(run: str, rank: int) -> str:
    """Return how the names of the arenas begin that this process makes for `rank`."""
    own = Process.current()
    return f"{run}-{rank}-{own.number}-{began(own.number)}-{own.space}-"


def wait_for_writers(
    storage: SharedStorage, run: str, deadline_s: float, silence_s: float, *, look_at_storage: bool
) -> set[str]:
    """Return when no writer of an earlier life of this run is at work here.

    With `look_at_storage`, saves in flight on other hosts are waited for too, until they are
    silent for `silence_s`. Returns the folders of attempts that nobody works in; what begins
    later is not among them.
    """
    end = time.monotonic() + deadline_s
    watch = _Attempts(storage, silence_s)
    notice_at = time.monotonic() + _NOTICE_S
    while True:
        orphans = [path for path in find_files(run) if _is_orphan(path)]
        alive = watch.alive() if look_at_storage else False
        if not orphans and not alive:
            return watch.dead
        if time.monotonic() > end:
            raise PeerFailed(
                f"{storage.name}: writers of an earlier start are still at work after {deadline_s:.0f} s: "
                f"{_who(storage, orphans, watch.living)}"
            )
        if time.monotonic() > notice_at:
            notice_at = end
            warn(
                f"{storage.name}: waiting up to {deadline_s:.0f} s for the writers of an earlier start, which finish "
                f"what it captured: {_who(storage, orphans, watch.living)}"
            )
        time.sleep(min(max(_POLL_S, storage.poll_s), silence_s))


def _who(storage: SharedStorage, arenas: Iterable[Path], folders: Iterable[str]) -> str:
    """Say which processes are at work, and how to end exactly these."""
    folders = sorted(folders)
    held = [storage.root / folder for folder in folders] if isinstance(storage, LocalStorage) else []
    processes = holders([*arenas, *held])
    if processes:
        numbers = " ".join(map(str, processes))
        return f"processes {numbers} of this host; wait for them, or end them with `kill -9 {numbers}`"
    hosts = {Mailbox(storage, attempt_of(folder) or "").host() or "a host that is not known" for folder in folders}
    where = f"host {', '.join(sorted(hosts))}" if folders else "another container of this host"
    return f"processes of {where}; wait for them, or end them there"


def dead_attempts(storage: SharedStorage, silence_s: float) -> set[str]:
    """The folders of attempts that nobody works in; for those of other hosts that takes up to `silence_s`."""
    watch = _Attempts(storage, silence_s)
    while True:
        watch.alive()
        if not watch.unsure:
            return {folder for folder in watch.dead if not _in_use(storage, folder)}
        time.sleep(min(_POLL_S, silence_s))


def _is_orphan(path: Path) -> bool:
    """Return whether an arena is held by a writer whose trainer is dead."""
    match = _ARENA.fullmatch(path.name)
    try:
        return match is not None and not _lives(match, path) and is_held(str(path))
    except FileNotFoundError:
        return False


def _trainer(arena: re.Match[str]) -> Process:
    return Process(int(arena["trainer"]), int(arena["space"]))


def _lives(arena: re.Match[str], path: Path) -> bool:
    """Return whether the trainer that an arena is named for lives: the same process, not another with its number.

    The number says nothing in another pid namespace; there the trainer's lock on the arena does.
    """
    trainer = _trainer(arena)
    if trainer.space == Process.current().space:
        return began(trainer.number) == int(arena["began"])
    return has_owner(str(path))


class _Attempts:
    """Watches attempts and mailboxes under a root: which are worked in, and which are dead."""

    def __init__(self, storage: SharedStorage, silence_s: float) -> None:
        self._storage = storage
        self._silence_s = silence_s
        self._heard: dict[str, tuple[Any, float]] = {}
        self.dead: set[str] = set()
        self.living: set[str] = set()
        self.unsure: set[str] = set()  # those that may be worked in on other hosts

    def alive(self) -> bool:
        """Whether a save is in flight; the answer no takes a few seconds of silence."""
        self.unsure.clear()
        hidden = set(self._storage.hidden())
        boxes = {folder for folder in hidden if attempt_of(folder)}
        living = {folder for folder in boxes if self._lives(folder)}
        alone = {folder for folder in hidden if _ATTEMPT.fullmatch(folder) and mail_folder(folder) not in boxes}
        self.dead = boxes - living | alone
        self.living = living
        return bool(living)

    def _lives(self, folder: str) -> bool:
        mailbox = Mailbox(self._storage, attempt_of(folder) or "")
        names = mailbox.names()
        if mail.OUTCOME in names and mailbox.outcome() is not None:
            return False
        if _in_use(self._storage, folder):
            return True
        host = mailbox.host()
        if host == host_identity():
            return False  # its coordinator was here, and would hold it
        words = {name: mailbox.read(name) for name in names if name.startswith("status-")}
        now = time.monotonic()
        known, since = self._heard.get(folder, (None, now))
        if folder not in self._heard or words != known:
            heard_again = folder in self._heard
            self._heard[folder] = (words, now)
            if not heard_again:
                self.unsure.add(folder)
            return True
        lives = now - since < (self._silence_s if host else min(_UNKNOWN_S, self._silence_s))
        if lives:
            self.unsure.add(folder)
        return lives


def clean_storage(storage: SharedStorage, dead: Collection[str]) -> list[str]:
    """Remove those of the `dead` attempts that no process of this host holds; returns their names.

    Removals that were cut short are finished too, as far as that is possible now.
    """
    gone = []
    for folder in sorted(dead):
        attempt = attempt_of(folder)
        if not _in_use(storage, folder):
            if attempt is not None:
                _discard(storage, attempt)
            _discard(storage, folder)
            gone.append(attempt or folder)
    return gone


def _discard(storage: SharedStorage, folder: str) -> None:
    """Remove a dead attempt; if a replaced step is in its place that a rewind gave up, set that aside.

    Replacing a step is an exchange of folders, and a crash may come before the older one got its name.
    """
    try:
        manifest = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
    except HoldfastError:
        storage.discard(folder)
        return
    left = (manifest.step or 0, manifest.attempt)
    if manifest.attempt != folder and left in left_steps(committed_steps(storage)):
        storage.rename(folder, unused_name(storage, abandoned_folder(left[0])))
    else:
        storage.discard(folder)


def _in_use(storage: SharedStorage, folder: str) -> bool:
    try:
        return storage.is_held(folder)
    except NotFound:
        return True  # it went while we looked: not ours to touch
    except Damaged:
        return False  # nobody can work in what cannot be found


def captured_sets(run: str) -> dict[str, list[Card]]:
    """The cards of arenas on this host that nobody holds, by attempt, in the order of ranks."""
    arenas = [path for path in find_files(run) if _ARENA.fullmatch(path.name)]
    cards = read_cards([Path(card_path(str(path))) for path in arenas if not _held(path)])
    by_attempt: dict[str, list[Card]] = {}
    for card in sorted(cards, key=lambda card: card.rank):
        if card.host == host_identity() and card.root == run:
            by_attempt.setdefault(card.attempt, []).append(card)
    return {
        attempt: members
        for attempt, members in by_attempt.items()
        if len({card.job["plan"] for card in members}) == 1 and len({card.rank for card in members}) == len(members)
    }


@dataclass(frozen=True, slots=True)
class Kept:
    """A state in the memory of this host that was captured and never written."""

    step: int
    paths: tuple[str, ...]
    size: int


def kept_states(run: str) -> list[Kept]:
    """Return the captured states that nobody holds: the next start under their root restores the newest."""
    found = []
    for cards in captured_sets(run).values():
        paths = tuple(card.arena for card in cards)
        sizes = [Path(path).stat().st_size for path in paths if Path(path).exists()]
        found.append(Kept(cards[0].step, paths, sum(sizes)))
    return sorted(found, key=lambda kept: kept.step)


def clean_arenas(run: str, keep: Callable[[str], bool] = lambda path: False) -> int:
    """Remove the run's arenas that nobody holds, but for those to `keep`; returns how many went."""
    gone = 0
    for path in find_files(run):
        arena = str(path).removesuffix(".card")
        if keep(arena) or _held(Path(arena)):
            continue
        cards = read_cards([Path(card_path(arena))])
        if cards[0].host == host_identity() if cards else not _has_trainer(Path(arena)):
            unlink_file(card_path(arena))
            unlink_file(arena)
            gone += 1
    return gone


def older_arenas(storage: SharedStorage) -> list[str]:
    """Return the arenas that versions without identities left on this host for a root of this path.

    They do not say which root they are of, so they are neither restored nor removed.
    """
    return [str(path) for path in find_files(older_run_id(storage)) if path.suffix != ".card" and not _held(path)]


def trainers(run: str) -> set[Process]:
    """Return the living processes of this host that have arenas for the run."""
    found = [(path, _ARENA.fullmatch(path.name)) for path in find_files(run)]
    return {_trainer(match) for path, match in found if match is not None and _seems_alive(match, path)}


def _has_trainer(path: Path) -> bool:
    """Return whether the process that made an arena lives: it may be about to hold it."""
    match = _ARENA.fullmatch(path.name)
    if match is None:
        return False
    if _trainer(match).space != Process.current().space and _age_s(path) < _YOUNG_S:
        return True
    return _seems_alive(match, path)


def _seems_alive(arena: re.Match[str], path: Path) -> bool:
    try:
        return _lives(arena, path)
    except FileNotFoundError:
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_ctime
    except FileNotFoundError:
        return 0.0


def _held(path: Path) -> bool:
    try:
        return is_held(str(path))
    except FileNotFoundError:
        return False
