"""Publishing: an attempt becomes a checkpoint when its manifest is durable and it is renamed."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, StorageError
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import Block, FileRecord, Manifest, decode_manifest, encode_manifest
from holdfast.format.names import MANIFEST, is_written
from holdfast.persist.checkpoint import Checkpoint
from holdfast.persist.write import BlockReport
from holdfast.plan.files import FilePlan
from holdfast.storage.base import Storage


def new_attempt() -> str:
    """A hidden folder name that no other attempt has."""
    return f".attempt-{secrets.token_hex(8)}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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


def small_file_record(data: bytes, block_bytes: int) -> FileRecord:
    """The record of a file that is written whole."""
    blocks = tuple(
        Block(at, len(data[at : at + block_bytes]), digest_hex(data[at : at + block_bytes]))
        for at in range(0, len(data), block_bytes)
    )
    return FileRecord(len(data), blocks)


def file_records(files: Sequence[FilePlan], reports: Iterable[BlockReport]) -> dict[str, FileRecord]:
    """Records of the tensor files from what the writers reported; raises if a byte is not covered."""
    by_file: dict[str, list[BlockReport]] = {file.name: [] for file in files}
    for report in reports:
        by_file[report.file].append(report)
    records = {}
    for file in files:
        position = 0
        blocks = []
        for report in sorted(by_file[file.name], key=lambda report: report.offset):
            if report.offset != position:
                raise StorageError(f"{file.name}: nobody reported the bytes from {position} to {report.offset}")
            blocks.append(Block(report.offset, report.size, report.digest))
            position += report.size
        if position != file.size:
            raise StorageError(f"{file.name}: {position} of {file.size} bytes were reported as written")
        header = Block(0, len(file.header), digest_hex(file.header))
        records[file.name] = FileRecord(file.size, tuple(blocks), header)
    return records


def publish(storage: Storage, attempt: str, folder: str, manifest: Manifest) -> bool:
    """Make the attempt the checkpoint `folder`; False if the same content is already there."""
    if _same_as_committed(storage, folder, manifest):
        storage.discard(attempt)
        return False
    storage.put(attempt, MANIFEST, encode_manifest(manifest))
    storage.publish(attempt, folder)
    return True


def _same_as_committed(storage: Storage, folder: str, manifest: Manifest) -> bool:
    """Whether the folder holds the same content, every byte of it still good."""
    try:
        committed = Checkpoint(storage, folder)
        return committed.manifest.content() == manifest.content() and committed.verify().good
    except HoldfastError:
        return False


def put_small_files(storage: Storage, attempt: str, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        storage.put(attempt, name, data)
