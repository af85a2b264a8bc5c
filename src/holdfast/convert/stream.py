"""Streaming of one rank's blocks on worker threads: assembly, verification and writing run concurrently.

A fixed number of block buffers circulates between the threads, so memory is bounded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from holdfast.checkpoint.attempt import Attempt, BlockWriter
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.assemble import assemble_blocks
from holdfast.convert.source_files import SourceCheckpoint, SourceFiles
from holdfast.convert.spans import SPAN_BLOCKS, BlockSpan, OutputBlock, SourceBlock
from holdfast.convert.verifying import Verifier
from holdfast.core.terminal import Progress
from holdfast.plan.files import RawArray, aligned_buffer
from holdfast.plan.load_plan import StoredFile

_POLL_S = 0.2


class Workers:
    """Worker threads. The first failure of any thread stops all of them."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=f"holdfast-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised again by `check`)
            self._failure = self._failure or error
            self.stop.set()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Wait for all threads to end. `check` raises the first failure."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_POLL_S)  # with a timeout, so that interrupts are delivered


class ConversionStream:
    """Writes spans of a conversion to the files of an attempt."""

    def __init__(
        self, source: SourceCheckpoint, stored: Sequence[StoredFile], progress: Progress, *, verify: bool
    ) -> None:
        self._source = source
        self._stored = stored
        self._progress = progress
        self._verify = verify
        self._free: queue.SimpleQueue[RawArray] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[OutputBlock, RawArray] | None] = queue.SimpleQueue()
        self._touched: queue.SimpleQueue[SourceBlock | None] = queue.SimpleQueue()
        self._reports: list[BlockReport] = []

    def run(
        self, spans: Sequence[BlockSpan], touches: Sequence[Sequence[SourceBlock]], attempt: Attempt
    ) -> list[BlockReport]:
        """Write the spans. `touches` are the source blocks to verify with each span.

        Returns once all blocks are durable and verified.
        """
        largest = max((block.size for span in spans for block in span.blocks), default=0)
        for _ in range(SPAN_BLOCKS if spans else 0):
            self._free.put(aligned_buffer(largest))
        workers, lock = Workers(), threading.Lock()
        written = (block.file.plan.name for span in spans for block in span.blocks)
        writer = attempt.block_writer(written, uncached=True)
        files = SourceFiles(self._source, lock)
        try:
            if self._verify:
                verifier = Verifier(self._source, self._stored, lock)
                workers.start("verify", lambda: verifier.run(self._touched, workers.stop))
            workers.start("write", lambda: self._write(writer, workers.stop))
            for span, fresh in zip(spans, touches, strict=True):
                self._assemble(span, fresh, files, workers)
            self._end()
            workers.join()
            workers.check()
        finally:
            workers.stop.set()
            self._end()
            workers.join()
            files.close()
            writer.close()
        return self._reports

    def _end(self) -> None:
        self._filled.put(None)
        self._touched.put(None)

    def _assemble(self, span: BlockSpan, fresh: Sequence[SourceBlock], files: SourceFiles, workers: Workers) -> None:
        blocks = [(block, self._buffer(workers)) for block in span.blocks]
        for block in fresh if self._verify else ():
            self._touched.put(block)
        assemble_blocks(files, blocks)
        for assembled in blocks:
            self._filled.put(assembled)

    def _buffer(self, workers: Workers) -> RawArray:
        while True:
            workers.check()
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def _write(self, writer: BlockWriter, stop: threading.Event) -> None:
        while not stop.is_set() and (filled := self._filled.get()) is not None:
            block, buffer = filled
            data = buffer[: block.size].data
            self._reports.append(writer.write(block.file.plan.name, block.offset, block.size, [data]))
            self._progress(block.size)
            self._free.put(buffer)
