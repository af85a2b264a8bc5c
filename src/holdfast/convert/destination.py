"""Where a conversion goes, and whether it may be published there."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.publish import check_replaceable
from holdfast.core.errors import HoldfastError, InvalidArgument, StorageError
from holdfast.format.names import MANIFEST
from holdfast.sources import open_stored
from holdfast.storage import locate, refuse_link
from holdfast.storage.base import SharedStorage

# What lies beside the tensors of a checkpoint; any other name may be somebody's work.
_BESIDE = (
    *("*.index.json", "config.json", "*_config.json", "tokenizer*", "vocab.*", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "trainer_state.json", "*.jinja", "*.model", "*.tiktoken", "*.py"),
)
_OF_DCP = ("*.distcp", ".metadata", "*.metadata")


@dataclass(frozen=True, slots=True)
class Destination:
    """The folder that a conversion becomes."""

    given: str
    storage: SharedStorage
    folder: str

    @staticmethod
    def at(path: str | os.PathLike[str]) -> Destination:
        return Destination(os.fspath(path), *locate(path))

    @property
    def path(self) -> str:
        return f"{self.storage.name}/{self.folder}"

    def check(self, source: Checkpoint, *, force: bool) -> None:
        """Raise unless a conversion of the source may be published here."""
        here, there = _real(self.path), _real(source.path)
        if f"{here}/".startswith(f"{there}/") or f"{there}/".startswith(f"{here}/"):
            raise InvalidArgument(
                f"{self.path} is, holds or lies in the source {source.path}, which stays as it is; "
                "choose another folder"
            )
        self.check_free(force=force)

    def check_free(self, *, force: bool) -> None:
        """Raise unless nothing is there, or `force` is given and it is a checkpoint and nothing else."""
        refuse_link(self.storage, self.folder)
        found = self.storage.entries(self.folder)
        if not found:
            return
        if not force:
            raise InvalidArgument(f"{self.path} exists; choose another folder, or replace it with --force")
        if found == [self.folder]:
            raise StorageError(
                f"{self.path} is a file, or holds nothing but {self.folder}; choose another folder, or move it away"
            )
        if MANIFEST in found:
            check_replaceable(self.storage, self.folder)
            return
        known = self._files_of_checkpoint(found)
        strange = [name for name in found if not _is_known(name, known)]
        if strange:
            raise StorageError(
                f"{self.path} holds more than a checkpoint ({', '.join(strange[:5])}); "
                "choose another folder, or move it away"
            )

    def _files_of_checkpoint(self, found: list[str]) -> frozenset[str]:
        """The tensor files of the checkpoint of another format that is here; raises StorageError if it is none."""
        try:
            opened = open_stored(self.given)
        except HoldfastError as error:
            raise StorageError(
                f"{self.path} holds {', '.join(found[:5])} and is not a checkpoint that can be opened; "
                f"choose another folder, or move it away ({error})"
            ) from None
        beside = (*_BESIDE, *_OF_DCP) if any(fnmatch.fnmatchcase(name, "*.metadata") for name in found) else _BESIDE
        base = {name: name.rpartition("/")[2] for name in found}
        small = {name for name in found if any(fnmatch.fnmatchcase(base[name], pattern) for pattern in beside)}
        return frozenset({*opened.manifest.files, *small})


def _is_known(name: str, known: frozenset[str]) -> bool:
    """Whether it is a known file, or a folder with one: what else is in the folder counts for itself."""
    return name in known or any(other.startswith(f"{name}/") for other in known)


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)
