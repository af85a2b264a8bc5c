"""The destination folder of a conversion, and the check that it is free or holds only a checkpoint to replace."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass

from holdfast.checkpoint.attempt import check_replaceable
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError, InvalidArgument, StorageError
from holdfast.core.names import MANIFEST
from holdfast.sources import open_stored
from holdfast.storage import locate, refuse_link
from holdfast.storage.base import SharedStorage

# Files stored next to the tensors of a checkpoint. Any other file may be the user's own.
_SIDE_FILES = (
    *("*.index.json", "config.json", "*_config.json", "tokenizer*", "vocab.*", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "trainer_state.json", "*.jinja", "*.model", "*.tiktoken", "*.py", "merge_record.json"),
)
_DCP_FILES = ("*.distcp", ".metadata", "*.metadata")


@dataclass(frozen=True, slots=True)
class DestinationFolder:
    """The folder that a conversion is published as."""

    raw_path: str
    storage: SharedStorage
    folder: str

    @staticmethod
    def at(path: str | os.PathLike[str]) -> DestinationFolder:
        return DestinationFolder(os.fspath(path), *locate(path))

    @property
    def path(self) -> str:
        return f"{self.storage.name}/{self.folder}"

    def check(self, source: Checkpoint, *, force: bool) -> None:
        """Raise unless a conversion of the source may be published here."""
        here, there = _real(self.path), _real(source.path)
        if f"{here}/".startswith(f"{there}/") or f"{there}/".startswith(f"{here}/"):
            raise InvalidArgument(
                f"{self.path} is the source {source.path}, contains it or is inside it, and the source is never "
                "modified; choose another folder"
            )
        self.check_free(force=force)

    def check_free(self, *, force: bool) -> None:
        """Raise unless the folder is free, or `force` is given and it contains only a checkpoint."""
        refuse_link(self.storage, self.folder)
        entries = self.storage.entries(self.folder)
        if not entries:
            return
        if not force:
            raise InvalidArgument(f"{self.path} exists; choose another folder, or replace it with --force")
        if entries == [self.folder]:  # what a storage says of a file
            raise StorageError(
                f"{self.path} is a file, or a folder with nothing but a file {self.folder}, and no checkpoint: choose "
                "another folder, or move it away"
            )
        if MANIFEST in entries:
            check_replaceable(self.storage, self.folder)
            return
        known = self._files_of_checkpoint(entries)
        unknown = [name for name in entries if not _is_known(name, known)]
        if unknown:
            raise StorageError(
                f"{self.path} contains other files than a checkpoint ({', '.join(unknown[:5])}); "
                "choose another folder, or move it away"
            )

    def _files_of_checkpoint(self, entries: list[str]) -> frozenset[str]:
        """Return the files of the foreign checkpoint in this folder. Raises StorageError if there is none."""
        try:
            opened = open_stored(self.raw_path)
        except HoldfastError as error:
            raise StorageError(
                f"{self.path} contains {', '.join(entries[:5])} and is not a checkpoint that can be opened; "
                f"choose another folder, or move it away ({error})"
            ) from None
        is_dcp = any(fnmatch.fnmatchcase(name, "*.metadata") for name in entries)
        patterns = (*_SIDE_FILES, *_DCP_FILES) if is_dcp else _SIDE_FILES
        base = {name: name.rpartition("/")[2] for name in entries}
        small = {name for name in entries if any(fnmatch.fnmatchcase(base[name], pattern) for pattern in patterns)}
        return frozenset({*opened.manifest.files, *small})


def _is_known(name: str, known: frozenset[str]) -> bool:
    """Return True if a path is a known file or a folder that contains one. Its other files are checked separately."""
    return name in known or any(other.startswith(f"{name}/") for other in known)


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)
