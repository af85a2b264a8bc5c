"""Enumerate every legal state of a disk after a power loss, create it in a folder, and call a judge.

    with recorded(folder) as recording:
        saved = holdfast.save(folder / "step-000000000001", state, step=1)
        recording.mark(Promise(1, (saved.manifest.attempt,)))
    outcome = judge_all(recording, judge_steps)

The power fails after every operation in turn. What was synced by then is durable. Of the rest:

- every subset of the name changes in a folder (creates, mkdirs, renames, exchanges, unlinks),
  each atomic, in no assumed order;
- for every file that then has a name, its unsynced writes: none, all, every prefix, each single
  one, all but each, each torn (only its first or last half, after all earlier writes), and the
  file's full size with zeros where nothing was written;
- all combinations of the two within a folder. Folders directly below the root vary one at a
  time, with all operations of the others applied, because a judge checks each checkpoint
  separately.

A folder with many unsynced name changes, such as the mailbox of a background save, has too many
subsets. There only all, none, every prefix, each single one and all but each are tried, and its
files vary one at a time.

Equal states are judged once for each set of promises.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.testing.disk import ROOT, DiskRecording, Mark, NameChange, Operation, Sync, Write

_LIMIT = 200_000
_MANY = 6  # with more name changes in one folder, not every subset is tried
Tree = tuple[tuple[str, Any], ...]  # names with the bytes of a file, or the tree of a folder
Judge = Callable[[Path, Sequence[Any]], str]


@dataclass
class PowerLossResult:
    """The number of different states, and the bad ones: (verdict, number of operations before it)."""

    states: int = 0
    bad: list[tuple[str, int]] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        return sum(1 for found, _ in self.bad if found.startswith(verdict))


def judge_all(
    recording: DiskRecording, judge: Judge, *, root: str = "", scratch: Path | None = None, every: int = 1
) -> PowerLossResult:
    """Create every state in its own folder and call `judge(folder, marks so far)`, which returns "" or a verdict.

    `root` is the storage's path below the recorded folder. With `every`, only each n-th state is judged.
    """
    outcome = PowerLossResult()
    for point, tree, marks in itertools.islice(legal_states(recording, root), 0, None, every):
        outcome.states += 1
        with tempfile.TemporaryDirectory(prefix="power-", dir=scratch) as folder:
            make(tree, Path(folder))
            verdict = judge(Path(folder) / root, marks)
        if verdict:
            outcome.bad.append((verdict, point))
    return outcome


def legal_states(recording: DiskRecording, root: str = "") -> Iterator[tuple[int, Tree, tuple[Any, ...]]]:
    """Yield every different state as (number of operations before it, tree, marks it must satisfy)."""
    seen: set[tuple[int, int]] = set()
    for point in range(len(recording.operations) + 1):
        before = recording.operations[:point]
        marks = tuple(operation.word for operation in before if isinstance(operation, Mark))
        for tree in _Crash(recording, before, root).trees():
            key = (hash(tree), len(marks))
            if key not in seen:
                seen.add(key)
                yield point, tree, marks


class _Crash:
    """A power loss after these operations."""

    def __init__(self, recording: DiskRecording, before: Sequence[Operation], root: str) -> None:
        self._recording = recording
        self._root = tuple(part for part in root.split("/") if part)
        last_sync = {operation.node: at for at, operation in enumerate(before) if isinstance(operation, Sync)}
        self._durable: dict[int, list[NameChange]] = {}
        self._unsynced: dict[int, list[NameChange]] = {}
        self._written: dict[int, list[Write]] = {}
        self._pending: dict[int, list[Write]] = {}
        for at, operation in enumerate(before):
            if isinstance(operation, NameChange):
                folder = _folder_of(operation)
                kept = self._durable if at < last_sync.get(folder, -1) else self._unsynced
                kept.setdefault(folder, []).append(operation)
            elif isinstance(operation, Write):
                written = self._written if at < last_sync.get(operation.node, -1) else self._pending
                written.setdefault(operation.node, []).append(operation)

    def trees(self) -> Iterator[Tree]:
        return self._folder(ROOT, ())

    def _folder(self, node: int, path: tuple[str, ...]) -> Iterator[Tree]:
        """Yield every state of a folder: each subset of its names, with each state of their contents."""
        waiting = self._unsynced.get(node, [])
        many = len(waiting) > _MANY
        for kept in _few_subsets(len(waiting)) if many else itertools.product((True, False), repeat=len(waiting)):
            names = self._names(node, [change for change, keep in zip(waiting, kept, strict=True) if keep])
            children = [(name, self._states(child, (*path, name))) for name, child in sorted(names.items())]
            if many or path == self._root:
                yield from _one_at_a_time(children)
            else:
                yield from _all_combinations(children, path)

    def _states(self, node: int, path: tuple[str, ...]) -> list[Any]:
        """Return the states of a node; the first has all operations applied."""
        if node not in self._recording.folders:
            return list(self._contents(node))
        return list(self._folder(node, path))

    def _names(self, node: int, kept: list[NameChange]) -> dict[str, int]:
        names = dict(self._recording.folders[node])
        for operation in (*self._durable.get(node, []), *kept):
            for _, name, child in operation.changes:
                names.pop(name, None)
                if child is not None:
                    names[name] = child
        return names

    def _contents(self, node: int) -> Iterator[bytes]:
        base = _applied(self._recording.files.get(node, b""), self._written.get(node, []))
        return iter(dict.fromkeys(_torn(base, self._pending.get(node, []))))


def _folder_of(operation: NameChange) -> int:
    folders = {folder for folder, _, _ in operation.changes}
    if len(folders) > 1:
        raise InvalidArgument("the states of a rename between two folders after a power loss are not modeled")
    return folders.pop()


def _few_subsets(count: int) -> Iterator[tuple[bool, ...]]:
    """Yield some subsets of many changes: all, none, every prefix, each single one, all but each."""
    yield from (tuple(at < first for at in range(count)) for first in range(count, -1, -1))
    for one in range(count):
        yield tuple(at == one for at in range(count))
        yield tuple(at != one for at in range(count))


def _one_at_a_time(children: list[tuple[str, list[Any]]]) -> Iterator[Tree]:
    whole = tuple((name, states[0]) for name, states in children)
    yield whole
    for at, (name, states) in enumerate(children):
        for state in states[1:]:
            yield (*whole[:at], (name, state), *whole[at + 1 :])


def _all_combinations(children: list[tuple[str, list[Any]]], path: tuple[str, ...]) -> Iterator[Tree]:
    count = math.prod(len(states) for _, states in children)
    if count > _LIMIT:
        raise InvalidArgument(f"{'/'.join(path)} has {count} possible states: record fewer operations at once")
    for states in itertools.product(*(states for _, states in children)):
        yield tuple((name, state) for (name, _), state in zip(children, states, strict=True))


def _torn(base: bytes, pending: list[Write]) -> Iterator[bytes]:
    """Yield the possible contents of a file; the first has all writes applied."""
    yield _applied(base, pending)
    yield base
    for at, write in enumerate(pending):
        half = len(write.data) // 2
        first = Write(write.node, write.offset, write.data[:half], write.size)
        last = Write(write.node, write.offset + half, write.data[half:], write.size)
        yield _applied(base, pending[:at])
        yield _applied(base, [write])
        yield _applied(base, [*pending[:at], *pending[at + 1 :]])
        yield _applied(base, [*pending[:at], first])
        yield _applied(base, [*pending[:at], last])
    yield base + bytes(max(0, len(_applied(base, pending)) - len(base)))


def _applied(base: bytes, writes: Sequence[Write]) -> bytes:
    data = bytearray(base)
    for write in writes:
        if write.size is not None:
            del data[write.size :]
            data.extend(bytes(write.size - len(data)))
        if write.data:
            data.extend(bytes(max(0, write.offset - len(data))))
            data[write.offset : write.offset + len(write.data)] = write.data
    return bytes(data)


def make(tree: Tree, folder: Path) -> None:
    """Create the files and folders of a state in an empty folder."""
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            os.mkdir(folder / name)
            make(content, folder / name)
