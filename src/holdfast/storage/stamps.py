"""Stamps of local manifests: one stat tells whether a file is still the one that was read."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import HoldfastError, NotFound, StorageError
from holdfast.core.filenames import MANIFEST

_MANY, _LIST_EVERY = 1000, 16
_TICK_NS = 100_000_000  # file systems of Linux stamp files by a clock that ticks every 1 to 10 ms


def stamp_of(status: os.stat_result) -> str:
    """Return the identity of a file's content: another file, or one that was written to, has another stamp."""
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def is_settled(status: os.stat_result) -> bool:
    """Return whether a change from now on would show in the stamp."""
    return abs(time.time_ns() - status.st_ctime_ns) > _TICK_NS


def _manifest_stamps(root: int, folders: Iterable[str]) -> dict[str, str | None]:
    """Stamp the manifests of folders below an open root: "" without a manifest, None without a folder."""
    found: dict[str, str | None] = {}
    for folder in folders:
        try:
            status = os.stat(f"{folder}/{MANIFEST}", dir_fd=root, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            found[folder] = "" if _is_listed(root, folder) else None
        else:
            found[folder] = stamp_of(status)
    return found


def _is_listed(root: int, name: str) -> bool:
    """Whether there is a folder of this name, or a link, of which its reader says whether it counts."""
    try:
        mode = os.stat(name, dir_fd=root, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


class StampedFolders:
    """The part of a local storage that tells which manifests have changed."""

    root: Path
    _unlisted = _LIST_EVERY  # how often names were not compared

    def folders(self) -> list[str]:
        raise NotImplementedError

    def stamps(self) -> dict[str, str]:
        folders = self.folders()
        if not folders:
            return {}
        with self._listing() as root:
            return {name: stamp for name, stamp in _manifest_stamps(root, folders).items() if stamp is not None}

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        """Compare the stamps of the important folders, and all names; among very many those now and then."""
        with self._listing() as root:
            changed: dict[str, str | None] = {}
            fresh: list[str] = []
            self._unlisted += 1
            if len(known) <= _MANY or self._unlisted >= _LIST_EVERY:
                self._unlisted = 0
                names = set(os.listdir(root))
                changed = dict.fromkeys(known.keys() - names)
                fresh = [name for name in names - known.keys() if not name.startswith(".") and self._is_folder(name)]
            looked_at = [folder for folder in important if folder in known and folder not in changed]
            for folder, stamp in _manifest_stamps(root, [*fresh, *looked_at]).items():
                if stamp != known.get(folder):
                    changed[folder] = stamp
        return changed

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        """Nothing to remember: the folder is the data."""

    def _is_folder(self, name: str) -> bool:
        """Whether `folders` lists a name."""
        path = self.root / name
        return name in self.folders() if path.is_symlink() else path.is_dir()

    @contextmanager
    def _listing(self) -> Iterator[int]:
        try:
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except FileNotFoundError as error:
            raise NotFound(f"listing {self.root}: {error.strerror}") from error
        except OSError as error:
            if isinstance(error, HoldfastError):
                raise
            raise StorageError(f"listing {self.root}: {error.strerror or error}") from error
