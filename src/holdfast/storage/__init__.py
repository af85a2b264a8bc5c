"""Storage backends opened by path or address (`storage_at`, `locate`); checks for checkpoints, links and trust."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import Damaged, InvalidArgument, NotFound, StorageError, Unsupported
from holdfast.core.limits import JSON_BYTES
from holdfast.core.names import MANIFEST
from holdfast.storage.base import SharedStorage, Storage
from holdfast.storage.local import LocalStorage
from holdfast.storage.objects.address import SCHEMES, Address

__all__ = [
    "Storage",
    "is_address",
    "is_checkpoint",
    "locate",
    "refuse_link",
    "shared_storage_at",
    "storage_at",
    "trust_check",
]


_LOST_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]", re.IGNORECASE)


def storage_at(root: str | os.PathLike[str] | Storage) -> Storage:
    """Return the storage for a local path or an address such as `s3://bucket/run`. A Storage is returned unchanged."""
    return root if isinstance(root, Storage) else shared_storage_at(root)


def shared_storage_at(root: str | os.PathLike[str]) -> SharedStorage:
    """Return the storage for a root that other processes can open too."""
    text = _text(root)
    if is_address(text):
        from holdfast.storage.objects.store import ObjectStorage

        return ObjectStorage(text)
    return LocalStorage(Path(text).expanduser().absolute())


def is_address(text: str) -> bool:
    """Return True if a text is an address, not a path. `s3://bucket` must never become a local folder.

    Raises InvalidArgument for an address that was converted by `pathlib.Path`.
    """
    if _LOST_SLASH.match(text):
        raise InvalidArgument(
            f"{text.partition(':')[0]}:/...: pathlib merges the slashes of an address; pass the address as a str"
        )
    return "://" in text


def locate(path: str | os.PathLike[str]) -> tuple[SharedStorage, str]:
    """Split the path or address of a checkpoint into its root and its folder name."""
    text = _text(path)
    if is_address(text):
        from holdfast.storage.objects.store import ObjectStorage

        root, folder = Address.parse(text).split()
        return ObjectStorage(root), folder
    absolute = Path(os.path.abspath(Path(text).expanduser()))
    return LocalStorage(absolute.parent), absolute.name


def is_checkpoint(storage: Storage) -> bool:
    """Return True if a root is itself a checkpoint rather than a folder of checkpoints."""
    try:
        storage.read("", MANIFEST, JSON_BYTES)
    except NotFound:
        return False
    except Damaged:
        return True
    return True


def trust_check(storage: Storage) -> Callable[[str], None]:
    """Return a check that raises Untrusted for a folder that another user may have created under the root.

    Only local roots have owners. Access to a bucket is controlled by the object store.
    """
    if not isinstance(storage, LocalStorage) or not storage.root.is_dir():
        return lambda folder: None
    return storage.trust_check()


def refuse_link(storage: Storage, folder: str) -> None:
    """Raise StorageError if the destination is a symbolic link, because it is unclear which folder to replace."""
    if isinstance(storage, LocalStorage) and (storage.root / folder).is_symlink():
        raise StorageError(f"{storage.root / folder} is a symbolic link; give the path of its target")


def _text(root: str | os.PathLike[str]) -> str:
    if not isinstance(root, str | os.PathLike) or not isinstance(os.fspath(root), str):
        raise Unsupported(f"{root!r} is neither a path nor a Storage")
    if not os.fspath(root):
        raise InvalidArgument("the root is an empty string; give the path of a folder")
    if "\0" in os.fspath(root) and "://" not in os.fspath(root):
        raise InvalidArgument(f"the path {os.fspath(root)[:200]!a} contains a null character")
    return os.fspath(root)
