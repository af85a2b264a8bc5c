"""Tensors read a window at a time, as float64: a statistic or a comparison of any tensor takes a few megabytes.

Blocks that a window touches are verified first, each once per reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.core.limits import MIB
from holdfast.format.digest import Digest
from holdfast.format.dtypes import dtype_named, numpy_dtype
from holdfast.plan.contents import Contents
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile
from holdfast.plan.recipe import Recipe
from holdfast.storage.base import Reader
from holdfast.web.open_steps import OpenStep

WINDOW_ELEMENTS = 256 * 1024
_BUFFER_BYTES = 2 * MIB
_OPEN_FILES = 8
_PACKED = frozenset({"float4_e2m1fn_x2"})

Values = npt.NDArray[np.float64]
Raw = npt.NDArray[Any]


class WindowReader:
    """Reads tensors of one checkpoint for one thread. `advance` is called with the bytes of every read."""

    def __init__(self, opened: OpenStep, advance: Callable[[int], None], contents: Contents | None = None) -> None:
        self._opened = opened
        self._checkpoint = opened.checkpoint
        self._advance = advance
        self._contents = contents
        self._files: dict[str, Reader] = {}
        self._verified: set[tuple[str, int]] = set()

    def __enter__(self) -> WindowReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def recipe(self, group: str, key: str) -> Recipe[Place]:
        """Return how a tensor is put together; raises NotFound, or Unsupported for packed elements."""
        if self._contents is not None:
            found = self._contents.find(group, key)
            if found is None:
                raise NotFound(f"{self._checkpoint.path} has no key {key[:200]!r} after the mapping")
            return found.recipe
        tensor = self._opened.tensor(group, key)
        if tensor.dtype in _PACKED:
            raise Unsupported(f"{tensor.dtype} elements are packed, and have no values of their own")
        if tensor.file is None or tensor.begin is None:
            return self._checkpoint.find(key, group).recipe
        logical = dtype_named(tensor.dtype)
        shape = (*tensor.shape, 2) if logical.pair else tensor.shape
        spec = TensorSpec(tensor.key, dtype_named(logical.stored), shape)
        return Recipe.whole(Place(spec, tensor.file, tensor.begin), shape, spec.dtype)

    def windows(self, recipe: Recipe[Place]) -> Iterator[Raw]:
        """Yield the elements of a tensor in row-major order, at most a window at a time; raises Damaged."""
        for place in recipe.sources():
            self._verify(place)
        whole = recipe.terms[0].source if recipe.terms else None
        if whole is not None and recipe.is_whole(whole.spec.shape):
            yield from self._direct(whole)
        else:
            yield from self._assembled(recipe)

    def _direct(self, place: Place) -> Iterator[Raw]:
        dtype = numpy_dtype(place.spec.dtype.name)
        step = WINDOW_ELEMENTS * dtype.itemsize
        buffer = bytearray(min(step, place.spec.bytes))
        for at in range(place.begin, place.end, step):
            part = memoryview(buffer)[: min(step, place.end - at)]
            self._file(place.file).read_into(at, [part])
            self._advance(len(part))
            yield np.frombuffer(part, dtype)

    def _assembled(self, recipe: Recipe[Place]) -> Iterator[Raw]:
        """Yield rows of a tensor that is permuted, cast or put together from several."""
        rows = recipe.shape[0] if recipe.shape else 1
        row = math.prod(recipe.shape[1:])
        count = max(1, WINDOW_ELEMENTS // max(1, row))
        if row > 64 * WINDOW_ELEMENTS:
            raise Unsupported(f"one row has {row} elements, too many to read at a time")
        files = [self._unverified(place) for place in recipe.sources()]
        for begin in range(0, rows, count):
            part = recipe.narrow(0, begin, min(count, rows - begin)) if recipe.shape else recipe
            array = self._checkpoint.read_recipe(part, files, verify=False)
            self._advance(array.nbytes)
            flat = array.reshape(-1)
            for at in range(0, flat.size, WINDOW_ELEMENTS):
                yield flat[at : at + WINDOW_ELEMENTS]

    def _unverified(self, place: Place) -> StoredFile:
        size = self._checkpoint.manifest.files[place.file].size
        return StoredFile(place.file, (StoredBlock(0, size, None),), (place,))

    def _file(self, name: str) -> Reader:
        file = self._files.get(name)
        if file is None:
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[name] = self._checkpoint.open_file(name)
        return file

    def _verify(self, place: Place) -> None:
        """Check the digests of the blocks that hold a tensor; raises Damaged."""
        for block in self._checkpoint.manifest.files[place.file].blocks:
            if block.offset >= place.end or block.offset + block.size <= place.begin:
                continue
            if (place.file, block.offset) in self._verified:
                continue
            digest, buffer, file = Digest(), bytearray(min(_BUFFER_BYTES, block.size)), self._file(place.file)
            for at in range(block.offset, block.offset + block.size, _BUFFER_BYTES):
                part = memoryview(buffer)[: min(_BUFFER_BYTES, block.offset + block.size - at)]
                file.read_into(at, [part])
                digest.update(part)
                self._advance(0)
            if digest.hexdigest() != block.digest:
                raise Damaged(f"{place.file}: the digest of the block at {block.offset} does not match")
            self._verified.add((place.file, block.offset))


def as_values(window: Raw) -> Values:
    """Return elements as float64; complex numbers as their absolute values."""
    if window.dtype.kind == "c":
        return np.abs(window).astype(np.float64)
    return window.astype(np.float64)
