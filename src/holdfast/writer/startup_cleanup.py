"""Cleanup at the start of a run: delete the attempts and arenas that no process holds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from holdfast.checkpoint.catalog import committed_steps, left_steps
from holdfast.checkpoint.retention import unused_name
from holdfast.checkpoint.run_identity import older_run_id
from holdfast.checkpoint.shared_memory import find_files, unlink_file
from holdfast.core import limits
from holdfast.core.errors import HoldfastError
from holdfast.core.host import host_identity
from holdfast.format.manifest import decode_manifest
from holdfast.format.names import MANIFEST, abandoned_folder
from holdfast.storage.base import SharedStorage
from holdfast.writer.arena_card import card_path, read_cards
from holdfast.writer.arena_owner import ArenaFile, is_held_file
from holdfast.writer.earlier_writers import is_in_use
from holdfast.writer.mailbox import attempt_of


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


def _discard(storage: SharedStorage, folder: str) -> None:
    """Delete a dead attempt, or set aside the abandoned step that its folder holds.

    A step is replaced by exchanging two folders. After a crash, the older step may still have the attempt's name.
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


def clean_arenas(run: str, keep: Callable[[str], bool] = lambda path: False) -> int:
    """Delete the run's arenas that no process holds, except those to `keep`; return the number deleted."""
    deleted = 0
    for path in find_files(run):
        arena = str(path).removesuffix(".card")
        if keep(arena) or is_held_file(Path(arena)):
            continue
        cards = read_cards([Path(card_path(arena))])
        if cards[0].host == host_identity() if cards else not _is_claimed(Path(arena)):
            unlink_file(card_path(arena))
            unlink_file(arena)
            deleted += 1
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
