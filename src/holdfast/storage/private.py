"""Private folders in directories that every user can write to, such as /dev/shm and /tmp: found or created.

Another user can create any name there first, and can see every existing name. So a folder's name
has a random suffix, and the folder is recognized by its owner and mode, never by its name alone.
Everything inside is opened through the descriptor that was checked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import StorageError

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def places() -> list[Path]:
    """Return the directories that all processes of this host share, in order of preference."""
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]


@contextmanager
def private_folders(name: str) -> Iterator[list[int]]:
    """Open every private folder of this user whose name begins with `name`. Create one if there is none.

    Usually there is one. Two processes that start at the same time may each create one, and an
    older version created its own. Each process lists the folders after creating its own, so a
    process that reads and writes all of them sees all others.
    """
    place = _choose_place()
    folders = _open_own(place, name)
    if not folders:
        _make(place, name)
        folders = _open_own(place, name)
    try:
        yield folders
    finally:
        for descriptor in folders:
            os.close(descriptor)


def _choose_place() -> Path:
    """Return the first writable directory in which other users cannot rename this user's files."""
    open_to_others = []
    for place in places():
        if not os.access(place, os.W_OK | os.X_OK):
            continue
        mode = place.stat().st_mode
        if mode & stat.S_ISVTX or not mode & 0o022:
            return place
        open_to_others.append(place)
    if open_to_others:
        raise StorageError(
            f"{open_to_others[0]}: other users can rename this user's files there, because its sticky bit is not set; "
            f"set it (chmod +t {open_to_others[0]}), or set TMPDIR to a folder of your own"
        )
    raise StorageError(f"none of {', '.join(map(str, places()))} is writable; set TMPDIR to a folder of your own")


def _make(place: Path, name: str) -> None:
    folder = place / f"{name}-{secrets.token_hex(16)}"
    os.mkdir(folder, 0o700)
    descriptor = os.open(folder, _FLAGS)
    try:
        os.fchmod(descriptor, 0o700)  # the umask may have removed the user's own rights
    finally:
        os.close(descriptor)


def _open_own(place: Path, name: str) -> list[int]:
    """Return descriptors of this user's private folders, in the order of their names."""
    with os.scandir(place) as entries:
        names = sorted(entry.name for entry in entries if entry.name == name or entry.name.startswith(f"{name}-"))
    folders = []
    for candidate in names:
        with contextlib.suppress(OSError):  # another user's folder, a link, a file, or deleted meanwhile
            descriptor = os.open(place / candidate, _FLAGS)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                folders.append(descriptor)
            else:
                os.close(descriptor)
    return folders
