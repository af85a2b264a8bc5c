"""Where bytes live: local files, object stores, memory. Knows folders and bytes, never a tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import Damaged, InvalidArgument, NotFound, StorageError, Unsupported
from holdfast.core.filenames import MANIFEST
from holdfast.core.limits import JSON_BYTES
from holdfast.storage.base import SharedStorage, Storage
from holdfast.storage.local import LocalStorage
from holdfast.storage.objects.address import Address, is_address

__all__ = ["Storage", "is_checkpoint", "locate", "refuse_link", "requirement", "shared_storage_at", "storage_at"]


def storage_at(root: str | os.PathLike[str] | Storage) -> Storage:
    """The storage for a root: a path on this machine, an address such as `s3://bucket/run`, a Storage as it is."""
    return root if isinstance(root, Storage) else shared_storage_at(root)


def shared_storage_at(root: str | os.PathLike[str]) -> SharedStorage:
    """The storage for a root that other processes can open too."""
    text = _text(root)
    if is_address(text):
        from holdfast.storage.objects.store import ObjectStorage

        return ObjectStorage(text)
    return LocalStorage(Path(text).expanduser().absolute())


def locate(path: str | os.PathLike[str]) -> tuple[SharedStorage, str]:
    """The root and the folder's name of a checkpoint's path or address."""
    text = _text(path)
    if is_address(text):
        from holdfast.storage.objects.store import ObjectStorage

        root, folder = Address.parse(text).split()
        return ObjectStorage(root), folder
    absolute = Path(os.path.abspath(Path(text).expanduser()))
    return LocalStorage(absolute.parent), absolute.name


def is_checkpoint(storage: Storage) -> bool:
    """Whether a root is itself a checkpoint, and not the folder above one."""
    try:
        storage.read("", MANIFEST, JSON_BYTES)
    except NotFound:
        return False
    except Damaged:
        return True
    return True


def requirement(storage: Storage) -> Callable[[str], None]:
    """A check for the folders that a root holds: raises Untrusted for one that another user may have put there.

    Only local roots have owners; who may write to a bucket is the store's affair.
    """
    if not isinstance(storage, LocalStorage) or not storage.root.is_dir():
        return lambda folder: None
    return storage.requirement()


def refuse_link(storage: Storage, folder: str) -> None:
    """Raise StorageError for a path to write to that is a symbolic link: only its target can be meant, or neither."""
    if isinstance(storage, LocalStorage) and (storage.root / folder).is_symlink():
        raise StorageError(f"{storage.root / folder} is a symbolic link; name the folder it points to")


def _text(root: str | os.PathLike[str]) -> str:
    if not isinstance(root, str | os.PathLike) or not isinstance(os.fspath(root), str):
        raise Unsupported(f"{root!r} is not a path, and not a storage")
    if not os.fspath(root):
        raise InvalidArgument("the root is an empty text: give a folder")
    if "\0" in os.fspath(root) and "://" not in os.fspath(root):
        raise InvalidArgument(f"the path {os.fspath(root)[:200]!a} has a null character")
    return os.fspath(root)
