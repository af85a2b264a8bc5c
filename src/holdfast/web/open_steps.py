"""Checkpoints that the page has open: tensors of a group as a tree, their places; a few are kept in memory."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from dataclasses import dataclass

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.tensor_tree import TensorTree, TreeRow
from holdfast.core.errors import NotFound
from holdfast.plan.files import Place
from holdfast.sources import open_stored
from holdfast.sources.foreign import Foreign
from holdfast.web.run_records import RunRecords

SELF = "self"  # the step of a run that is itself one checkpoint
_MOST_OPEN = 4
_MOST_TENSORS = 250_000  # of all open checkpoints together


@dataclass(frozen=True, slots=True)
class StepTensor:
    """A tensor as the page shows it; without a file, it is put together from several places."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str | None
    begin: int | None
    end: int | None


class OpenStep:
    """One open checkpoint. The tensors of a group are read when they are asked for. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.lock = threading.RLock()
        self._trees: dict[str, TensorTree] = {}
        self._begins: dict[str, list[int]] = {}

    @property
    def tensors(self) -> int:
        """The number of tensors in memory."""
        with self.lock:
            return sum(tree.top.tensors for tree in self._trees.values()) * 2

    def known_tensors(self, group: str) -> int | None:
        """Return the number of a group's tensors if its headers were read already, else None."""
        with self.lock:
            tree = self._trees.get(group)
            return None if tree is None else tree.top.tensors

    def require_group(self, group: str) -> None:
        """Raise NotFound unless the checkpoint has a group."""
        if group not in self.checkpoint.groups:
            known = ", ".join(self.checkpoint.groups) or "none"
            raise NotFound(f"{self.checkpoint.path} has no group {group[:80]!r}; its groups are {known}")

    def tree(self, group: str) -> TensorTree:
        """Return the tree of a group's keys."""
        self.require_group(group)
        with self.lock:
            if group not in self._trees:
                found = (self._facts(group, key) for key in self._keys(group))
                self._trees[group] = TensorTree(
                    TreeRow(tensor.key, f"{tensor.dtype}{list(tensor.shape)}", tensor.bytes) for tensor in found
                )
            return self._trees[group]

    def _keys(self, group: str) -> list[str]:
        if isinstance(self.checkpoint, Foreign):
            return list(self.checkpoint.contents.groups[group].tensors)
        return list(self.checkpoint.places[group])

    def keys(self, group: str) -> list[str]:
        """Return the keys of a group in the order of its files."""
        self.require_group(group)
        with self.lock:
            return self._keys(group)

    def tensor(self, group: str, key: str) -> StepTensor:
        """Return a tensor; raises NotFound."""
        self.require_group(group)
        with self.lock:
            return self._facts(group, self.checkpoint.find(key, group).key)

    def _facts(self, group: str, key: str) -> StepTensor:
        if not isinstance(self.checkpoint, Foreign):
            place = self.checkpoint.places[group][key]
            logical = self.checkpoint.manifest.groups[group].logical_dtypes.get(key)
            if logical is None:
                spec = place.spec
                return StepTensor(key, spec.dtype.name, spec.shape, spec.bytes, place.file, place.begin, place.end)
        tensor = self.checkpoint.find(key, group)
        places = tensor.recipe.sources()
        one: Place | None = places[0] if len(places) == 1 and tensor.recipe.is_whole(places[0].spec.shape) else None
        return StepTensor(
            tensor.key,
            tensor.logical,
            tensor.logical_shape,
            tensor.bytes,
            one.file if one is not None else None,
            one.begin if one is not None else None,
            one.end if one is not None else None,
        )

    def blocks(self, tensor: StepTensor) -> tuple[int, int]:
        """Return the first block of a tensor in its file, and the one after its last; (0, 0) without blocks."""
        if tensor.file is None or tensor.begin is None or tensor.end is None:
            return 0, 0
        blocks = self.checkpoint.manifest.files[tensor.file].blocks
        begins = self._begins.get(tensor.file)
        if begins is None:
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
        """Return an open checkpoint; one whose manifest has changed is opened again."""
        key, identity = (records.run.id, step), _identity(records, step)
        with self._lock:
            known = self._open.get(key)
            if known is not None and known[0] == identity:
                self._open.move_to_end(key)
                self._shrink(keep=key)
                return known[1]
        opened = OpenStep(_open(records, step))
        with self._lock:
            self._open[key] = identity, opened
            self._open.move_to_end(key)
            self._shrink(keep=key)
        return opened

    def _shrink(self, keep: tuple[str, str]) -> None:
        while len(self._open) > 1:
            tensors = sum(opened.tensors for _, opened in self._open.values())
            oldest = next(iter(self._open))
            if oldest == keep or (len(self._open) <= _MOST_OPEN and tensors <= _MOST_TENSORS):
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

