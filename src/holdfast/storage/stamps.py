"""Stamps of local manifests: one stat call detects a file that changed since it was read; changed folders."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import HoldfastError, NotFound, StorageError
from holdfast.core.names import MANIFEST

_MANY, _LIST_EVERY = 1000, 16
_TICK_NS = 100_000_000  # Linux file systems use a clock that ticks every 1 to 10 ms


def stamp_of(status: os.stat_result) -> str:
    """Return the stamp of a file. A replaced or modified file has another stamp."""
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def is_settled(status: os.stat_result) -> bool:
    """Return True if any later change would alter the stamp."""
    return abs(time.time_ns() - status.st_ctime_ns) > _TICK_NS


def _manifest_stamps(root: int, folders: Iterable[str]) -> dict[str, str | None]:
    """Stamp the manifests of folders under an open root: "" without a manifest, None without a folder."""
    stamps: dict[str, str | None] = {}
    for folder in folders:
        try:
            status = os.stat(f"{folder}/{MANIFEST}", dir_fd=root, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            stamps[folder] = "" if _is_listed(root, folder) else None
        else:
            stamps[folder] = stamp_of(status)
    return stamps


def _is_listed(root: int, name: str) -> bool:
    """Return True if a folder or symlink of this name exists. Readers decide whether a symlink is valid."""
    try:
        mode = os.stat(name, dir_fd=root, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


class StampedFolders:
    """A base of local storage that detects changed manifests."""

    root: Path
    _unlisted = _LIST_EVERY  # number of calls since names were last compared

    def folders(self) -> list[str]:
        raise NotImplementedError

    def stamps(self) -> dict[str, str]:
        folders = self.folders()
        if not folders:
            return {}
        with self._listing() as root:
            return {name: stamp for name, stamp in _manifest_stamps(root, folders).items() if stamp is not None}

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        """Compare the stamps of the important folders, and all names; names of many folders only now and then."""
        with self._listing() as root:
            changed: dict[str, str | None] = {}
            fresh: list[str] = []
            self._unlisted += 1
            if len(known) <= _MANY or self._unlisted >= _LIST_EVERY:
                self._unlisted = 0
                names = set(os.listdir(root))
                changed = dict.fromkeys(known.keys() - names)
                fresh = [name for name in names - known.keys() if not name.startswith(".") and self._is_folder(name)]
            compared = [folder for folder in important if folder in known and folder not in changed]
            for folder, stamp in _manifest_stamps(root, [*fresh, *compared]).items():
                if stamp != known.get(folder):
                    changed[folder] = stamp
        return changed

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        """Do nothing: a local folder contains its data."""

    def _is_folder(self, name: str) -> bool:
        """Return True if `folders` lists a name."""
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
