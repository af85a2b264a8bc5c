"""Whose folders a root may hold: those of this user, of the superuser, and of users that were named.

`restore` and retention take what a root holds without being told its name, so that in a root which
others can write to, anyone could plant a step with a high number. No code runs from a checkpoint,
but its weights and values would be another's. A checkpoint that the caller names by its path is
not judged here. docs/adr/0019 has the reasons and the cases of containers and NFS.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import Damaged, InvalidArgument, Untrusted

OWNERS_VARIABLE = "HOLDFAST_TRUST_OWNERS"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Trust:
    """The judgement of one root: which users are trusted, and whether only its owner can put folders there."""

    root: Path
    owners: frozenset[int]
    everyone: bool
    closed: bool

    @staticmethod
    def of(root: Path) -> Trust:
        """Look at a root; raises InvalidArgument if HOLDFAST_TRUST_OWNERS names a user that there is not."""
        owners, everyone = _named_owners()
        status = root.stat()
        # In /tmp and the like anyone may have made the root itself, before this user did.
        is_placed = not root.resolve().parent.stat().st_mode & stat.S_IWOTH
        if is_placed or status.st_uid in owners:
            owners |= {status.st_uid}
        closed = status.st_uid in owners and not status.st_mode & _OTHERS_WRITE
        return Trust(root, frozenset(owners), everyone, closed)

    def require(self, folder: str, manifest: str) -> None:
        """Raise Untrusted for a folder that a user may have put there who is not trusted; Damaged for a bad link."""
        path = self.root / folder
        if self.everyone:
            return
        if path.is_symlink():
            self._require_link(path)
        if self.closed:
            return
        self._require_owner(path, path.lstat())
        status = path.stat()
        self._require_owner(path, status)
        if status.st_mode & _OTHERS_WRITE:
            # Hidden folders hold what a run goes by: its policy, its tags, its catalogue.
            for file in path.iterdir() if folder.startswith(".") else (path / manifest,):
                with contextlib.suppress(FileNotFoundError):
                    self._require_owner(file, file.lstat())

    def _require_link(self, link: Path) -> None:
        """Follow a link only to a place that nobody but trusted users can change."""
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            raise Damaged(f"{link} is a symbolic link to {link.readlink()}, which is not there") from None
        if not target.is_dir():
            raise Damaged(f"{link} is a symbolic link to {target}, which is not a folder")
        for place in (target, *target.parents):
            status = place.stat()
            self._require_owner(link, status, f"is a symbolic link to {target}, and {place} belongs to")
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                raise Untrusted(
                    f"{link} is a symbolic link to {target}, and every user can replace what is in {place}; "
                    f"take that right away (chmod o-w {place}), or move the folder into the root"
                )

    def _require_owner(self, path: Path, status: os.stat_result, belongs: str = "belongs to") -> None:
        if status.st_uid not in self.owners:
            raise Untrusted(
                f"{path} {belongs} {_named(status.st_uid)}, and not to this user ({_named(os.geteuid())}); "
                f"if you trust that user, set {OWNERS_VARIABLE}={status.st_uid}{_hint(status.st_uid)}"
            )


def is_listed_link(entry: os.DirEntry[str]) -> bool:
    """Whether a link counts as a folder: a step may be one, and so may a step that was replaced or removed."""
    return entry.is_symlink() and (not entry.name.startswith(".") or entry.name.startswith((".removed-", ".attempt-")))


def unlink_if_link(path: Path) -> bool:
    """Delete a symbolic link, and nothing of what it leads to; False if the path is no link."""
    if not path.is_symlink():
        return False
    path.unlink(missing_ok=True)
    return True


def _named_owners() -> tuple[set[int], bool]:
    """The users that are trusted anywhere, and whether that is everyone."""
    names = [name.strip() for name in os.environ.get(OWNERS_VARIABLE, "").split(",") if name.strip()]
    if "*" in names:
        return set(), True
    owners = {os.geteuid(), 0} | {_number(name) for name in names}
    sudo = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and sudo.isascii() and sudo.isdigit():
        owners.add(int(sudo))
    return owners, False


def _number(name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise InvalidArgument(
            f"{OWNERS_VARIABLE}: there is no user {name[:80]!r}; write numbers or names with commas between them, "
            "or * for everyone"
        ) from None


def _named(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _hint(uid: int) -> str:
    if uid != _NOBODY:
        return ""
    return f" ({uid} is also what files look like whose owner this container or NFS mount has no number for)"
