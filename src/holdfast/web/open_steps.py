"""Checkpoints that the page has open: the tensors of their groups; a few are kept in memory."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import NotFound
from holdfast.core.limits import MIB
from holdfast.sources import open_stored
from holdfast.web.run_records import RunRecords
from holdfast.web.tensor_index import StepTensor, TensorIndex, index_group

SELF = "self"  # the step of a run that is itself one checkpoint
_MOST_OPEN = 4
_MOST_TENSORS = 250_000  # of all open checkpoints together
_AT_ONCE_BYTES = 2 * MIB  # of headers


class OpenStep:
    """One open checkpoint. The tensors of a group are read when they are asked for. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.lock = threading.RLock()
        self._indexes: dict[str, TensorIndex] = {}
        self._begins: dict[str, list[int]] = {}

    @property
    def tensors(self) -> int:
        """The number of tensors in memory."""
        return sum(len(index) for index in list(self._indexes.values()))

    def count(self, group: str) -> int | None:
        """Return the number of a group's tensors, None if reading its headers would take a moment."""
        record = self.checkpoint.manifest.groups[group]
        headers = (self.checkpoint.manifest.files[file].header for file in record.files)
        if group in self._indexes or sum(header.size for header in headers if header is not None) < _AT_ONCE_BYTES:
            return len(self.index(group))
        return None

    def index(self, group: str) -> TensorIndex:
        """Return the tensors of a group; raises NotFound."""
        if group not in self.checkpoint.groups:
            known = ", ".join(self.checkpoint.groups) or "none"
            raise NotFound(f"{self.checkpoint.path} has no group {group[:80]!r}; its groups are {known}")
        with self.lock:
            if group not in self._indexes:
                self._indexes[group] = index_group(self.checkpoint, group)
            return self._indexes[group]

    def tensor(self, group: str, key: str) -> StepTensor:
        """Return a tensor by its key or by another key of a tied one; raises NotFound."""
        index = self.index(group)
        with self.lock:
            aliases = self.checkpoint.manifest.groups[group].aliases
            found = index.find(aliases.get(key, key))
        if found is None:
            raise NotFound(f"{self.checkpoint.path} has no key {key[:200]!r} in the group {group!r}")
        return found

    def blocks(self, tensor: StepTensor) -> tuple[int, int]:
        """Return the first block of a tensor in its file, and the one after its last; (0, 0) without blocks."""
        if tensor.file is None or tensor.begin is None or tensor.end is None:
            return 0, 0
        begins = self._begins.get(tensor.file)
        if begins is None:
            blocks = self.checkpoint.manifest.files[tensor.file].blocks
            begins = self._begins[tensor.file] = [block.offset for block in blocks]
        if not begins or tensor.begin == tensor.end:
            return 0, 0
        return bisect.bisect_right(begins, tensor.begin) - 1, bisect.bisect_left(begins, tensor.end)


class OpenSteps:
    """The checkpoints that were looked at last, by run and folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], tuple[object, OpenStep]] = OrderedDict()

    def get(self, records: RunRecords, step: str) -> OpenStep:
        """Return an open checkpoint; one that was saved again is opened again."""
        key, identity = (records.run.id, step), _identity(records, step)
        with self._lock:
            known = self._open.get(key)
            if known is not None and known[0] == identity:
                self._open.move_to_end(key)
                self._shrink(key)
                return known[1]
        opened = OpenStep(_open(records, step))
        with self._lock:
            self._open[key] = identity, opened
            self._open.move_to_end(key)
            self._shrink(key)
        return opened

    def _shrink(self, kept: tuple[str, str]) -> None:
        while True:
            tensors = sum(opened.tensors for _, opened in self._open.values())
            oldest = next(iter(self._open))
            if oldest == kept or (len(self._open) <= _MOST_OPEN and tensors <= _MOST_TENSORS):
                return
            del self._open[oldest]


def _identity(records: RunRecords, step: str) -> object:
    """Return what changes if a step is saved again; raises NotFound for a step that does not exist."""
    if records.run.kind == "checkpoint":
        if step != SELF:
            raise NotFound(f"{records.run.name} is one checkpoint: its only step is {SELF!r}")
        return SELF
    entry = records.entry(step)
    if entry.problem is not None:
        raise entry.problem
    return entry.manifest.attempt if entry.manifest is not None else None


def _open(records: RunRecords, step: str) -> Checkpoint:
    if records.run.kind == "checkpoint":
        return open_stored(records.run.address)
    return Checkpoint(records.run.storage, step)
