"""Every legal state of a disk after a power loss, from the recorded operations of a save.

    with recorded(folder) as recording:
        holdfast.save(folder / "step-000000000001", state, step=1)
        recording.mark(Promise(1))
    outcome = judge_all(recording, judge_steps)

The power goes after every operation in turn. What was synced by then is there. Of the rest:

- every subset of the changes of names in a folder (creates, mkdirs, renames, exchanges,
  unlinks), each whole or not at all, in no assumed order;
- for every file that has a name then, its unsynced writes: none, all, every number of the
  first ones, each alone, all but each, each torn (only its first or its last half landed, with
  all before it), and the file's full size with zeros where nothing landed;
- all combinations of the two within a folder. Folders directly below the root are taken one at
  a time, with all of the others' operations kept, because a judge looks at each checkpoint by
  itself.

A folder with very many unsynced changes of names, such as the mailbox of a background save, has
too many subsets: there all, none, every number of the first ones, each alone and all but each are
kept, and its files are taken one at a time.

States that are the same are judged once for each set of promises.
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
from holdfast.testing.disk import ROOT, Mark, Names, Operation, Recording, Sync, Write

_LIMIT = 200_000
_MANY = 6  # changes of names in one folder: of more, not every subset is tried
Tree = tuple[tuple[str, Any], ...]  # names with the bytes of a file, or the tree of a folder
Judge = Callable[[Path, Sequence[Any]], str]


@dataclass
class Outcome:
    """How many different states there are, and those that a judge found bad: (verdict, after which operation)."""

    states: int = 0
    bad: list[tuple[str, int]] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        return sum(1 for found, _ in self.bad if found.startswith(verdict))


def judge_all(
    recording: Recording, judge: Judge, *, root: str = "", scratch: Path | None = None, every: int = 1
) -> Outcome:
    """Make every state in a folder of its own and ask `judge(folder, marks so far)`: "" if it is good, else why not.

    `root` is where the storage lies below the recorded folder. With `every`, only each n-th state is judged.
    """
    outcome = Outcome()
    for point, tree, marks in itertools.islice(legal_states(recording, root), 0, None, every):
        outcome.states += 1
        with tempfile.TemporaryDirectory(prefix="power-", dir=scratch) as folder:
            make(tree, Path(folder))
            verdict = judge(Path(folder) / root, marks)
        if verdict:
            outcome.bad.append((verdict, point))
    return outcome


def legal_states(recording: Recording, root: str = "") -> Iterator[tuple[int, Tree, tuple[Any, ...]]]:
    """Every different state with the marks it must answer for: (number of operations before it, names, marks)."""
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
    """The power goes after these operations."""

    def __init__(self, recording: Recording, before: Sequence[Operation], root: str) -> None:
        self._recording = recording
        self._root = tuple(part for part in root.split("/") if part)
        last_sync = {operation.node: at for at, operation in enumerate(before) if isinstance(operation, Sync)}
        self._sure: dict[int, list[Names]] = {}
        self._open: dict[int, list[Names]] = {}
        self._written: dict[int, list[Write]] = {}
        self._pending: dict[int, list[Write]] = {}
        for at, operation in enumerate(before):
            if isinstance(operation, Names):
                folder = _folder_of(operation)
                (self._sure if at < last_sync.get(folder, -1) else self._open).setdefault(folder, []).append(operation)
            elif isinstance(operation, Write):
                kept = self._written if at < last_sync.get(operation.node, -1) else self._pending
                kept.setdefault(operation.node, []).append(operation)

    def trees(self) -> Iterator[Tree]:
        return self._folder(ROOT, ())

    def _folder(self, node: int, path: tuple[str, ...]) -> Iterator[Tree]:
        """Every state of a folder: each subset of its names, with what they may hold."""
        waiting = self._open.get(node, [])
        many = len(waiting) > _MANY
        for kept in _few_subsets(len(waiting)) if many else itertools.product((True, False), repeat=len(waiting)):
            names = self._names(node, [change for change, keep in zip(waiting, kept, strict=True) if keep])
            children = [(name, self._states(child, (*path, name))) for name, child in sorted(names.items())]
            if many or path == self._root:
                yield from _one_at_a_time(children)
            else:
                yield from _all_combinations(children, path)

    def _states(self, node: int, path: tuple[str, ...]) -> list[Any]:
        """What a name may hold; first the state with everything kept."""
        if node not in self._recording.folders:
            return list(self._contents(node))
        return list(self._folder(node, path))

    def _names(self, node: int, kept: list[Names]) -> dict[str, int]:
        names = dict(self._recording.folders[node])
        for operation in (*self._sure.get(node, []), *kept):
            for _, name, child in operation.changes:
                names.pop(name, None)
                if child is not None:
                    names[name] = child
        return names

    def _contents(self, node: int) -> Iterator[bytes]:
        base = _applied(self._recording.files.get(node, b""), self._written.get(node, []))
        return iter(dict.fromkeys(_torn(base, self._pending.get(node, []))))


def _folder_of(operation: Names) -> int:
    folders = {folder for folder, _, _ in operation.changes}
    if len(folders) > 1:
        raise InvalidArgument("a rename from one folder to another: its states after a power loss are not known here")
    return folders.pop()


def _few_subsets(count: int) -> Iterator[tuple[bool, ...]]:
    """Which of many changes are kept: all, none, the first ones, each alone, all but each."""
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
        raise InvalidArgument(f"{'/'.join(path)} may be in {count} states: record less at once")
    for states in itertools.product(*(states for _, states in children)):
        yield tuple((name, state) for (name, _), state in zip(children, states, strict=True))


def _torn(base: bytes, pending: list[Write]) -> Iterator[bytes]:
    """What a file may hold; first all of it."""
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
    """Make a state's files and folders in an empty folder."""
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            os.mkdir(folder / name)
            make(content, folder / name)
