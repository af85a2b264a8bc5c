"""Private folders in places that every user can write to, such as /dev/shm and /tmp.

Another user can make any name there first, and can see every name that was made. So a folder's
name ends in what nobody can guess, and it is found again by its owner and its mode, never by
its name alone. Everything inside is opened through the descriptor that was checked.
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
    """The folders of this host that processes of one user share, the better ones first."""
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]


@contextmanager
def private_folders(name: str) -> Iterator[list[int]]:
    """Open every private folder of this user whose name begins with `name`; make one if there is none.

    Usually there is one. Two processes that start at the same instant may each make one, and an
    older version made its own: who writes into all of them and looks into all of them misses
    nobody, because each process lists the folders after it has made its own.
    """
    place = _choose_place()
    found = _open_own(place, name)
    if not found:
        _make(place, name)
        found = _open_own(place, name)
    try:
        yield found
    finally:
        for descriptor in found:
            os.close(descriptor)


def _choose_place() -> Path:
    """The first place that is writable, and in which nobody else can rename this user's files."""
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
    raise StorageError(f"none of {', '.join(map(str, places()))} can be written to; set TMPDIR to a folder of your own")


def _make(place: Path, name: str) -> None:
    folder = place / f"{name}-{secrets.token_hex(16)}"
    os.mkdir(folder, 0o700)
    descriptor = os.open(folder, _FLAGS)
    try:
        os.fchmod(descriptor, 0o700)  # a umask may have taken more away than others' rights
    finally:
        os.close(descriptor)


def _open_own(place: Path, name: str) -> list[int]:
    """Descriptors of this user's private folders, in the order of their names."""
    with os.scandir(place) as entries:
        names = sorted(entry.name for entry in entries if entry.name == name or entry.name.startswith(f"{name}-"))
    found = []
    for candidate in names:
        with contextlib.suppress(OSError):  # another user's, a link, a file, or gone since it was listed
            descriptor = os.open(place / candidate, _FLAGS)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                found.append(descriptor)
            else:
                os.close(descriptor)
    return found
