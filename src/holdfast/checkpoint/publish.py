"""Publishing: an attempt becomes a checkpoint when its manifest is durable and it is renamed."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from holdfast.checkpoint.catalog import committed_steps, steps_left
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.retention import free_name
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, StorageError
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.format.names import MANIFEST, abandoned_folder, is_written
from holdfast.storage.base import Storage


def new_attempt() -> str:
    """A hidden folder name that no other attempt has."""
    return f".attempt-{secrets.token_hex(8)}"


def check_replaceable(storage: Storage, folder: str) -> None:
    """Refuse to replace a folder that holds anything but a checkpoint: the rest is not ours to delete.

    With a damaged manifest, files under names that Holdfast writes are taken for its own. A
    checkpoint of a newer format, or one that cannot be read just now, raises what it is.
    """
    found = storage.entries(folder)
    if MANIFEST in found:
        try:
            manifest = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
        except Damaged:
            known = {name for name in found if is_written(name)}
        else:
            known = {MANIFEST, *manifest.files, *(name.split("/")[0] for name in manifest.files)}
    else:
        known = set()
    strange = [name for name in found if name not in known]
    if strange:
        raise StorageError(
            f"{storage.name}/{folder} holds files that Holdfast did not write ({', '.join(strange[:5])}); "
            "choose another folder, or move them away"
        )


def begin(storage: Storage, attempt: str, folder: str, files: Iterable[tuple[str, int]]) -> None:
    """Make the attempt's folder with its files at full size, once it is known that `folder` may be replaced."""
    check_replaceable(storage, folder)
    storage.begin(attempt)
    for name, size in files:
        storage.create(attempt, name, size)


def publish(storage: Storage, attempt: str, folder: str, manifest: Manifest, small: Mapping[str, bytes]) -> bool:
    """Make the attempt the checkpoint `folder`; False if the same content is already there."""
    try:
        replaced = storage.read(folder, MANIFEST, limits.JSON_BYTES)
    except HoldfastError:
        replaced = b""
    if replaced and _same_as_committed(storage, folder, manifest):
        storage.discard(attempt)
        return False
    for name, data in small.items():
        storage.put(attempt, name, data)
    storage.put(attempt, MANIFEST, encode_manifest(manifest))
    storage.publish(attempt, folder, _aside(storage, folder, manifest) if replaced else "")
    return True


def _same_as_committed(storage: Storage, folder: str, manifest: Manifest) -> bool:
    """Whether the folder holds the same content, every byte of it still good, and says as much of other steps."""
    try:
        committed = Checkpoint(storage, folder)
        known = committed.manifest
        says_more = {*manifest.abandons} - {*known.abandons} or {*manifest.skips} - {*known.skips}
        measured = manifest.metrics and manifest.metrics != known.metrics
        if known.content() != manifest.content() or says_more or measured:
            return False
        is_left = (known.step, known.attempt) in steps_left(committed_steps(storage))
        return not is_left and committed.verify().good
    except HoldfastError:
        return False


def _aside(storage: Storage, folder: str, manifest: Manifest) -> str:
    """The name for what is replaced: a step that a rewind gave up is set aside, another goes."""
    try:
        replaced = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
    except HoldfastError:
        return ""
    if replaced.step is None or (replaced.step, replaced.attempt) not in manifest.abandons:
        return ""
    return free_name(storage, abandoned_folder(replaced.step))
