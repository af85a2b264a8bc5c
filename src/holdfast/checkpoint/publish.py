"""Publishing: an attempt becomes a checkpoint by a durable manifest and a rename."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.catalog import committed_steps, left_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.retention import unused_name
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, StorageError
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.format.names import MANIFEST, abandoned_folder, is_holdfast_name
from holdfast.storage.base import Storage


def check_replaceable(storage: Storage, folder: str) -> None:
    """Refuse to replace a folder that holds other files than a checkpoint: they are not ours to delete.

    With a damaged manifest, files with names that Holdfast writes count as its own. Raises the
    error of a checkpoint that has a newer format or cannot be read now.
    """
    found = storage.entries(folder)
    if MANIFEST in found:
        try:
            manifest = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
        except Damaged:
            known = {name for name in found if is_holdfast_name(name)}
        else:
            known = {MANIFEST, *manifest.files, *(name.split("/")[0] for name in manifest.files)}
    else:
        known = set()
    foreign = [name for name in found if name not in known]
    if foreign:
        raise StorageError(
            f"{storage.name}/{folder} holds files that Holdfast did not write ({', '.join(foreign[:5])}); "
            "choose another folder, or move them away"
        )


def publish(attempt: Attempt, manifest: Manifest, small: Mapping[str, bytes]) -> bool:
    """Make the attempt a checkpoint; return False if its folder already has the same content."""
    storage, folder = attempt.storage, attempt.folder
    try:
        replaced = storage.read(folder, MANIFEST, limits.JSON_BYTES)
    except HoldfastError:
        replaced = b""
    if replaced and _same_as_committed(storage, folder, manifest):
        attempt.discard()
        return False
    attempt.put({**small, MANIFEST: encode_manifest(manifest)})
    attempt.publish(_set_aside_name(storage, folder, manifest) if replaced else "")
    return True


def _same_as_committed(storage: Storage, folder: str, manifest: Manifest) -> bool:
    """Return True if the folder holds the same intact content and leaves behind at least the same steps."""
    try:
        committed = Checkpoint(storage, folder)
        known = committed.manifest
        leaves_more = {*manifest.abandons} - {*known.abandons} or {*manifest.skips} - {*known.skips}
        measured = manifest.metrics and manifest.metrics != known.metrics
        if known.content() != manifest.content() or leaves_more or measured:
            return False
        is_left = (known.step, known.attempt) in left_steps(committed_steps(storage))
        return not is_left and committed.verify().good
    except HoldfastError:
        return False


def _set_aside_name(storage: Storage, folder: str, manifest: Manifest) -> str:
    """Return a new name for a replaced step that a rewind abandoned; "" for one to delete."""
    try:
        replaced = decode_manifest(storage.read(folder, MANIFEST, limits.JSON_BYTES), folder)
    except HoldfastError:
        return ""
    if replaced.step is None or (replaced.step, replaced.attempt) not in manifest.abandons:
        return ""
    return unused_name(storage, abandoned_folder(replaced.step))
