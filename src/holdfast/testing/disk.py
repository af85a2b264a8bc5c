"""A model of a disk: recorded writes, renames and syncs, the input of powerloss.py.

Nodes are numbered files and folders, like inodes: a rename moves a name, never a node. A file's
data is durable after an fsync of the file, a name after an fsync of its folder. Nothing else is
durable, and no order between other operations is assumed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.testing.system import SystemCall, watched_system

ROOT = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes written to a file at an offset; with `size` the file is first resized."""

    node: int
    offset: int = 0
    data: bytes = b""
    size: int | None = None


@dataclass(frozen=True, slots=True)
class NameChange:
    """One atomic change of names: (folder, name, its new node or None)."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """An fsync of a file or a folder."""

    node: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark set by the test: the promise made to the caller at this point."""

    word: Any


Operation = Write | NameChange | Sync | Mark


@dataclass
class DiskRecording:
    """The initial, durable contents of a disk (`folders`, `files`), and every operation since."""

    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)

    def mark(self, word: Any) -> None:
        """Record that something was acknowledged at this point."""
        self.operations.append(Mark(word))


class _Recorder:
    """Records the calls below one folder and tracks the current names."""

    def __init__(self, top: Path) -> None:
        self._top = os.path.realpath(top)
        self.recording = DiskRecording()
        self._next = ROOT
        self._lock = threading.RLock()  # the threads of a save post notes concurrently
        self._now: dict[int, dict[str, int]] = {}
        self._load(Path(self._top))
        self.recording.folders = {node: dict(names) for node, names in self._now.items()}

    def _load(self, path: Path) -> int:
        node = self._number()
        if path.is_dir():
            self._now[node] = {}
            self._now[node] = {child.name: self._load(child) for child in sorted(path.iterdir())}
        else:
            self.recording.files[node] = path.read_bytes()
        return node

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def watch(self, call: SystemCall, work: Callable[[], Any]) -> Any:
        if not call.path.startswith(self._top + os.sep) and call.path != self._top:
            return work()
        with self._lock:
            before = len(self.recording.operations)
            result = work()
            if call.name == "exchange" and len(self.recording.operations) > before:
                return result  # the system has no exchange: its replacement by renames was recorded
            written = call.data[:result] if call.name in ("write", "pwrite", "pwritev") else call.data
            self.recording.operations += self._operations(call, written)
            return result

    def _operations(self, call: SystemCall, data: bytes) -> Iterator[Operation]:
        if call.name in ("create", "mkdir"):
            node = self._number()
            if call.name == "mkdir":
                self._now[node] = {}
                self.recording.folders[node] = {}
            yield self._name((call.path, node))
        elif call.name == "rename":
            yield self._name((call.path, None), (call.other, self._find(call.path)))
        elif call.name == "link":
            yield self._name((call.other, self._find(call.path)))
        elif call.name == "exchange":
            yield self._name((call.path, self._find(call.other)), (call.other, self._find(call.path)))
        elif call.name in ("unlink", "rmdir"):
            yield self._name((call.path, None))
        elif call.name in ("fsync", "fdatasync"):
            yield Sync(self._find(call.path))
        elif call.name in ("ftruncate", "reserve", "truncate"):
            yield Write(self._find(call.path), size=call.size)
        elif call.name != "open":
            yield Write(self._find(call.path), call.offset, data)

    def _name(self, *named: tuple[str, int | None]) -> NameChange:
        changes = []
        for path, node in named:
            changes.append((self._find(str(Path(path).parent)), Path(path).name, node))
        for folder, name, found in changes:
            self._now[folder].pop(name, None)
            if found is not None:
                self._now[folder][name] = found
        return NameChange(tuple(changes))

    def _find(self, path: str) -> int:
        node = ROOT
        for name in Path(path).relative_to(self._top).parts:
            node = self._now[node][name]
        return node


@contextmanager
def recorded(top: Path) -> Iterator[DiskRecording]:
    """Record every operation of this process below a folder, starting from its current contents."""
    recorder = _Recorder(top)
    with watched_system(recorder.watch):
        yield recorder.recording
