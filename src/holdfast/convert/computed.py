"""Tensors that are computed while a conversion reads them, a band of rows at a time: dequantized, quantized, merged.

A computed tensor is a file that is in no folder. Mappings, sinks and the streaming of blocks use it like any other
file, so that its values take the memory of a few rows. The blocks of its inputs are verified as always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.assemble import fill
from holdfast.convert.source_files import SourceFiles
from holdfast.core.limits import MIB
from holdfast.format.dtypes import DType
from holdfast.layout.box import Box
from holdfast.plan.files import ArrayDestination, Place, RawArray, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile
from holdfast.plan.recipe import Recipe, destinations_of
from holdfast.sources.foreign import VirtualFile
from holdfast.storage.base import Reader

BAND_BYTES = 4 * MIB
_CACHED_BANDS = 2

ReadBox = Callable[[Recipe[Place], Box], RawArray]
TensorInputs = Iterator[tuple[Recipe[Place], Box]]


class Computation(Protocol):
    """A matrix whose rows are computed from other tensors, `band_rows` rows together."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def band_rows(self) -> int: ...

    def inputs(self, begin: int, end: int) -> TensorInputs:
        """Yield the boxes of tensors that the rows are computed from."""

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        """Return the rows as raw elements. `read` returns a box of an input as raw elements."""


def rows_per_band(columns: int, multiple: int = 1) -> int:
    """Return a multiple of rows whose float32 values take about BAND_BYTES."""
    return max(1, BAND_BYTES // max(1, 4 * columns * multiple)) * multiple


class ComputedTensors:
    """The computed tensors of one source, and the source's files while they are read. Thread-safe."""

    def __init__(self, source: Checkpoint, further: Mapping[str, VirtualFile] | None = None) -> None:
        """Begin without tensors. Their inputs may be in `further` files, too."""
        self.source = source
        self._further = further or {}
        self.path = source.path
        self.files: dict[str, ComputedFile] = {}
        self._lock = threading.RLock()
        self._inputs: SourceFiles | None = None
        self._readers = 0
        self._bands: dict[tuple[str, int], RawArray] = {}
        self._kept: dict[int, RawArray] = {}  # small inputs that every band of the tensor needs
        self._kept_for = ""

    def add(self, key: str, computation: Computation) -> Recipe[Place]:
        """Add a tensor, and return the recipe of its values."""
        name = f"computed:{len(self.files)}:{key}"
        self.files[name] = ComputedFile(name, computation, self)
        return Recipe.whole(self.files[name].place, computation.shape, computation.dtype)

    def stored_files(self) -> tuple[StoredFile, ...]:
        """Return the computed files as values, without digests."""
        return tuple(
            StoredFile(name, (StoredBlock(0, file.size, None),) if file.size else (), (file.place,))
            for name, file in self.files.items()
        )

    def open_file(self, name: str) -> Reader:
        if name in self._further:
            return self._further[name].open()
        return self.source.open_file(name)

    def opened(self) -> None:
        with self._lock:
            self._readers += 1

    def closed(self) -> None:
        """Close the files of the source with the last reader."""
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._bands.clear()
                self._kept.clear()
                if self._inputs is not None:
                    self._inputs.close()
                    self._inputs = None

    def band(self, file: ComputedFile, number: int) -> RawArray:
        """Return a band of rows as raw elements: computed, or one of the last ones."""
        with self._lock:
            known = self._bands.get((file.name, number))
            if known is None:
                if self._kept_for != file.name:
                    self._kept.clear()
                    self._kept_for = file.name
                while len(self._bands) >= _CACHED_BANDS:
                    self._bands.pop(next(iter(self._bands)))
                rows = file.computation.band_rows
                end = min((number + 1) * rows, file.computation.shape[0])
                known = np.ascontiguousarray(file.computation.compute(number * rows, end, self._read_for_band))
                self._bands[file.name, number] = known
            return known

    def read(self, recipe: Recipe[Place], box: Box) -> RawArray:
        """Return a box of an input as raw elements."""
        if self._inputs is None:
            self._inputs = SourceFiles(self, threading.Lock())
        array = np.empty(box.sizes, f"u{recipe.dtype.bytes}")
        if array.size:
            fill(self._inputs, destinations_of(recipe, box, ArrayDestination(array)))
        return array

    def _read_for_band(self, recipe: Recipe[Place], box: Box) -> RawArray:
        """Return a box of an input; a whole small one is kept, because the tensor's next band needs it too."""
        if box.sizes != recipe.shape:
            return self.read(recipe, box)
        known = self._kept.get(id(recipe))
        if known is None:
            known = self.read(recipe, box)
            if known.nbytes <= BAND_BYTES:
                self._kept[id(recipe)] = known
        return known


@dataclass(frozen=True, slots=True, eq=False)
class ComputedFile:
    """One computed tensor as a file."""

    name: str
    computation: Computation
    owner: ComputedTensors
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        spec = TensorSpec(self.name, self.computation.dtype, self.computation.shape)
        object.__setattr__(self, "place", Place(spec, self.name, 0))

    @property
    def size(self) -> int:
        return self.place.spec.bytes

    def open(self) -> Reader:
        return ComputedReader(self)

    def inputs(self, begin: int, end: int) -> TensorInputs:
        width, rows = self.row_bytes, self.computation.band_rows
        first, last = begin // width // rows * rows, -(-end // width // rows) * rows
        return self.computation.inputs(first, min(last, self.computation.shape[0]))

    @property
    def row_bytes(self) -> int:
        return max(1, self.computation.shape[1] * self.computation.dtype.bytes)


class ComputedReader:
    """An open computed file."""

    mappable = False

    def __init__(self, file: ComputedFile) -> None:
        self._file = file
        self._open = True
        file.owner.opened()

    @property
    def size(self) -> int:
        return self._file.size

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        data = memoryview(bytearray(size))
        self.read_into(offset, [data])
        return data

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            target = np.frombuffer(buffer.cast("B"), np.uint8)
            self._fill(offset, target)
            offset += target.nbytes

    def _fill(self, offset: int, target: RawArray) -> None:
        band_bytes = self._file.row_bytes * self._file.computation.band_rows
        end = offset + target.nbytes
        for number in range(offset // band_bytes, -(-end // band_bytes)):
            band = self._file.owner.band(self._file, number).reshape(-1).view(np.uint8)
            begin, stop = max(offset, number * band_bytes), min(end, (number + 1) * band_bytes)
            at = begin - number * band_bytes
            target[begin - offset : stop - offset] = band[at : at + stop - begin]

    def close(self) -> None:
        if self._open:
            self._open = False
            self._file.owner.closed()
