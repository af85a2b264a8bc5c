"""The interface of sinks: a pure function from contents to a planned output, its tensor files and small files.

A sink lays out the tensor files of its format (names, headers, offsets and recipes of tensors) and
provides the small files stored next to them. It reads no tensor and opens no file. The conversion
assembles the bytes block by block on every rank, and publishes the folder atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.spans import TensorFile
from holdfast.core.ranks import Ranks
from holdfast.layout.box import Box
from holdfast.plan.contents import Contents
from holdfast.plan.files import FilePlan, Place, RawArray
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """Options for a sink, in addition to the contents.

    `side_files` are small files of the source that are not tensors: config.json, tokenizers.
    `writer`, `metrics`, `plans`, `bases` and `mappings` come from the manifest of a Holdfast source.
    """

    max_shard_bytes: int
    block_bytes: int
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    writer: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    plans: Mapping[str, Any] = field(default_factory=dict)
    bases: Mapping[str, Any] = field(default_factory=dict)
    mappings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The context of a sink that writes its own tensor files, because their bytes cannot be planned.

    `read` returns a box of a recipe's tensor as raw elements. The box is verified before publication.
    """

    ranks: Ranks
    folder: Path
    read: Callable[[Recipe[Place], Box], RawArray]
    progress: Callable[[int], None]


SmallFiles = Callable[[str, Sequence[BlockReport]], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Output:
    """The planned contents of a folder.

    `small_files` is called on one rank with the attempt's name once every block is written. It
    returns the small files in write order, with a manifest last. `notes` tell the user what the
    format cannot store or stores differently. With `write`, `files` are only descriptive: every
    rank calls `write` to write them, and `prepare` before, which imports what it needs.
    """

    files: tuple[TensorFile, ...]
    small_files: SmallFiles
    notes: tuple[str, ...] = ()
    write: Callable[[SinkContext], None] | None = None
    prepare: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        """The total size of the tensor files."""
        return sum(file.plan.size for file in self.files)


Sink = Callable[[Contents, SinkRequest], Output]


def tensor_files(group: str, plans: Sequence[FilePlan], recipes: Mapping[str, Recipe[Place]]) -> list[TensorFile]:
    """Combine the planned files of a group with the recipes of their tensors."""
    return [TensorFile(group, plan, tuple(recipes[place.spec.key] for place in plan.places)) for plan in plans]


def omitted_names(contents: Contents, written: Collection[str]) -> list[str]:
    """Return the names of groups and values that are not `written`, for a note to the user."""
    values = [name for name in contents.state if name not in contents.groups]
    extras = [
        f"the extra state of {name}"
        for name, entry in contents.state.items()
        if name in written and entry.get("kind") == "module" and entry.get("value", True)
    ]
    return [*sorted(name for name in {*contents.groups, *values} if name not in written), *sorted(extras)]
