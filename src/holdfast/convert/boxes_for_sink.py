"""Verified reads of boxes of recipes, for a sink that writes its own tensor files (torch DCP)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from holdfast.convert.assemble import fill
from holdfast.convert.source_files import SourceCheckpoint, SourceFiles
from holdfast.convert.spans import SourceBlock, SourceBlockFinder
from holdfast.convert.stream import Workers
from holdfast.convert.verifying import Verifier
from holdfast.layout.box import Box
from holdfast.plan.files import ArrayDestination, Place, RawArray
from holdfast.plan.load_plan import StoredFile
from holdfast.plan.recipe import Recipe, destinations_of
from holdfast.sources.foreign import Foreign


class BoxReader:
    """Reads boxes of recipes, and verifies the source blocks they use on another thread."""

    def __init__(self, source: SourceCheckpoint, stored: Sequence[StoredFile], *, verify: bool) -> None:
        self._lock = threading.Lock()
        self._files = SourceFiles(source, self._lock)
        self._finder = SourceBlockFinder(stored, source.virtual_files if isinstance(source, Foreign) else None)
        self._verifier = Verifier(source, stored, self._lock) if verify else None
        self._touched: queue.SimpleQueue[SourceBlock | None] = queue.SimpleQueue()
        self._seen: set[SourceBlock] = set()
        self._workers = Workers()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Allow reads within the context. At its end all data read is verified, or Damaged is raised."""
        if self._verifier is not None:
            verifier = self._verifier
            self._workers.start("verify", lambda: verifier.run(self._touched, self._workers.stop))
        try:
            yield
            self._touched.put(None)
            self._workers.join()
            self._workers.check()
        finally:
            self._workers.stop.set()
            self._touched.put(None)
            self._workers.join()
            self._files.close()

    def read(self, recipe: Recipe[Place], box: Box) -> RawArray:
        """Return a box of a recipe's tensor as raw elements."""
        self._workers.check()
        if self._verifier is not None:
            for touched in self._finder.touched(recipe, box):
                if touched not in self._seen:
                    self._seen.add(touched)
                    self._touched.put(touched)
        array = np.empty(box.sizes, f"u{recipe.dtype.bytes}")
        if array.size:
            fill(self._files, destinations_of(recipe, box, ArrayDestination(array)))
        return array
