"""Trusted owners of folders and links under a root: this user, the superuser, HOLDFAST_TRUST_OWNERS.

`restore` and retention use folders that the caller did not name. In a root that others can write
to, anyone could plant a step with a high number. No code runs from a checkpoint, but its weights
and values would be another user's. A checkpoint that the caller names by its path is not checked
here. docs/adr/0019 has the reasons and the cases of containers and NFS.
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
    """The trusted users of one root, and whether only its owner can create folders in it."""

    root: Path
    owners: frozenset[int]
    everyone: bool
    closed: bool

    @staticmethod
    def of(root: Path) -> Trust:
        """Inspect a root. Raises InvalidArgument if HOLDFAST_TRUST_OWNERS names an unknown user."""
        owners, everyone = _trusted_owners()
        status = root.stat()
        # In /tmp and the like, another user may have created the root itself.
        is_parent_safe = not root.resolve().parent.stat().st_mode & stat.S_IWOTH
        if is_parent_safe or status.st_uid in owners:
            owners |= {status.st_uid}
        closed = status.st_uid in owners and not status.st_mode & _OTHERS_WRITE
        return Trust(root, frozenset(owners), everyone, closed)

    def require(self, folder: str, manifest: str) -> None:
        """Raise Untrusted for a folder that an untrusted user may have created; Damaged for a broken link."""
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
            # Hidden folders hold the run's policy, tags and catalog.
            for file in path.iterdir() if folder.startswith(".") else (path / manifest,):
                with contextlib.suppress(FileNotFoundError):
                    self._require_owner(file, file.lstat())

    def _require_link(self, link: Path) -> None:
        """Raise unless only trusted users can change the target of a link."""
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            raise Damaged(f"{link} is a symbolic link to {link.readlink()}, which does not exist") from None
        if not target.is_dir():
            raise Damaged(f"{link} is a symbolic link to {target}, which is not a folder")
        for place in (target, *target.parents):
            status = place.stat()
            self._require_owner(link, status, f"is a symbolic link to {target}, and {place} belongs to")
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                raise Untrusted(
                    f"{link} is a symbolic link to {target}, and every user can replace the contents of {place}; "
                    f"remove that permission (chmod o-w {place}), or move the folder into the root"
                )

    def _require_owner(self, path: Path, status: os.stat_result, belongs: str = "belongs to") -> None:
        if status.st_uid not in self.owners:
            raise Untrusted(
                f"{path} {belongs} {_describe_user(status.st_uid)}, not to this user ({_describe_user(os.geteuid())}); "
                f"if you trust that user, set {OWNERS_VARIABLE}={status.st_uid}{_hint(status.st_uid)}"
            )


def _trusted_owners() -> tuple[set[int], bool]:
    """Return the users trusted under every root, and whether everyone is trusted."""
    names = [name.strip() for name in os.environ.get(OWNERS_VARIABLE, "").split(",") if name.strip()]
    if "*" in names:
        return set(), True
    owners = {os.geteuid(), 0} | {_user_id(name) for name in names}
    sudo = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and sudo.isascii() and sudo.isdigit():
        owners.add(int(sudo))
    return owners, False


def _user_id(name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise InvalidArgument(
            f"{OWNERS_VARIABLE}: unknown user {name[:80]!r}; give user ids or names separated by commas, "
            "or * for everyone"
        ) from None


def _describe_user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _hint(uid: int) -> str:
    if uid != _NOBODY:
        return ""
    return f" ({uid} also stands for owners that this container or NFS mount cannot map to a user)"
