"""Whether a conversion may be published where it was told to."""

from __future__ import annotations

import fnmatch

from holdfast.core.errors import InvalidArgument, StorageError
from holdfast.format.names import MANIFEST
from holdfast.persist.publish import check_replaceable
from holdfast.storage.base import Storage

# Names that checkpoints of other formats are made of: such a folder may be replaced when that is asked for.
_OF_CHECKPOINTS = (
    *("*.safetensors", "*.json", "*.jsonl", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "*.py"),
    *("*.distcp", ".metadata", "*.metadata", "*.pt", "*.bin", "*.pdparams", "*.pdopt"),
)


def check_free(storage: Storage, folder: str, *, force: bool) -> None:
    """Raise unless nothing is there, or `force` is given and it is a checkpoint and nothing else."""
    found = storage.entries(folder)
    if not found:
        return
    where = f"{storage.name}/{folder}"
    if not force:
        raise InvalidArgument(f"{where} exists; choose another folder, or replace it with --force")
    if found == [folder]:
        raise StorageError(f"{where} is a file, or holds nothing but {folder}; choose another folder, or move it away")
    if MANIFEST in found:
        check_replaceable(storage, folder)
        return
    strange = [name for name in found if not _is_of_checkpoint(name, found)]
    if strange:
        raise StorageError(
            f"{where} holds more than a checkpoint ({', '.join(strange[:5])}); choose another folder, or move it away"
        )


def _is_of_checkpoint(name: str, found: list[str]) -> bool:
    if any(other.startswith(f"{name}/") for other in found):
        return True  # a folder: what is in it counts
    base = name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in _OF_CHECKPOINTS)
