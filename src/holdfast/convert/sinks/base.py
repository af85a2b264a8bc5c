"""What a sink is: a pure function from contents to files, which the engine then streams.

A sink lays out the tensor files of its format (names, headers, where each tensor lies, what it is
made of) and says which small files go beside them. It reads no tensor and opens no file: the
engine assembles the bytes block by block, on every rank, and publishes the folder at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.commit import BlockReport
from holdfast.core.ranks import Ranks
from holdfast.layout.box import Box
from holdfast.plan.arrays import RawArray
from holdfast.plan.contents import Contents
from holdfast.plan.files import FilePlan, Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a sink beside the contents.

    `side_files` are small files of the source that are not tensors: config.json, tokenizers.
    `writer`, `metrics` and `plans` are what a Holdfast source says of the run that wrote it.
    """

    max_shard_bytes: int
    block_bytes: int
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    writer: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    plans: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor file to be written, and what each of its places is made of, in their order."""

    group: str
    plan: FilePlan
    recipes: tuple[Recipe[Place], ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a sink works that writes its tensor files by itself, because their bytes cannot be laid out before.

    `read` gives a box of a recipe's tensor as raw elements; it is verified before anything is published.
    """

    ranks: Ranks
    folder: Path
    read: Callable[[Recipe[Place], Box], RawArray]
    progress: Callable[[int], None]


SmallFiles = Callable[[str, Sequence[BlockReport]], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Output:
    """All that a folder of some format will hold.

    `small_files` is called on one rank with the attempt's name once every block is written, and
    gives the small files in the order in which they are written: one that commits comes last.
    `notes` are told to the user: what the format cannot hold, what it holds in another way.
    With `write`, the files only say what will be in the folder: every rank calls it to write them.
    """

    files: tuple[TensorFile, ...]
    small_files: SmallFiles
    notes: tuple[str, ...] = ()
    write: Callable[[Scene], None] | None = None


Sink = Callable[[Contents, Request], Output]


def tensor_files(group: str, plans: Sequence[FilePlan], recipes: Mapping[str, Recipe[Place]]) -> list[TensorFile]:
    """Planned files of a group with the recipes of their tensors, by key."""
    return [TensorFile(group, plan, tuple(recipes[place.spec.key] for place in plan.places)) for plan in plans]


def left_out(contents: Contents, written: Collection[str]) -> list[str]:
    """Groups and values that a format which holds only these groups has no place for, as users know them."""
    values = [name for name in contents.state if name not in contents.groups]
    extras = [
        f"the extra state of {name}"
        for name, entry in contents.state.items()
        if name in written and entry.get("kind") == "module" and entry.get("value", True)
    ]
    return [*sorted(name for name in {*contents.groups, *values} if name not in written), *sorted(extras)]
