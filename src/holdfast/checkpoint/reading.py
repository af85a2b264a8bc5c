"""Reads of a load plan: on threads, verified and copied to their destinations, each byte once per host.

Files of this host are read through the page cache, which holds every byte once for all ranks: each
rank copies its parts from it, and one rank of the host verifies each block. What only one rank
needs and the cache does not hold is read past it. Files that cannot be mapped are read directly
into live memory if only one rank needs the bytes, otherwise into a window of shared memory from
which all ranks copy (see host_windows.py). Where one host reads for others, portions are passed
from rank to rank (see plan/passing.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol

from holdfast.checkpoint.block_reader import BlockReader, Destinations, FlatDestinations, check_digest
from holdfast.checkpoint.host_windows import WindowExchange
from holdfast.checkpoint.passed_portions import receive_portion, send_portion
from holdfast.core.errors import HoldfastError, error_from_record, error_record
from holdfast.core.limits import MIB
from holdfast.core.ranks import RankLinks, Ranks, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest
from holdfast.plan.files import RawArray, aligned_buffer, piece_in_run
from holdfast.plan.load_plan import Portion, Read
from holdfast.plan.passing import OncePlan, Transfer, transfers_of
from holdfast.plan.staging import SMALLEST_BUFFER_BYTES, HostStaging, Staging, ThreadBuffers
from holdfast.storage.base import Reader
from holdfast.storage.open_files import OpenReaders

PORTION_BYTES = SMALLEST_BUFFER_BYTES
MAP_BYTES = 64 * MIB  # the largest portion that is mapped
MEMORY_PORTION_BYTES = 8 * MIB  # and of those in memory, which may be copied
_THREAD_BYTES = 8 * MIB  # a thread for fewer bytes costs more than it saves


class LoadSource(Protocol):
    """A checkpoint whose files a load reads."""

    @property
    def path(self) -> str: ...

    def open_file(self, name: str) -> Reader: ...


@dataclass(slots=True)
class Loaded:
    """The bytes that this rank read, the files whose tensors it filled, and its first failure."""

    read_bytes: int = 0
    failure: HoldfastError | None = None
    touched: set[str] = field(default_factory=set)


class Loading:
    """One rank's share of a load plan. Collective: every rank takes part, even without anything to read."""

    def __init__(
        self,
        ranks: Ranks,
        source: LoadSource,
        destinations: Destinations,
        progress: Progress,
        make_staging: Callable[[], Staging],
    ) -> None:
        self._ranks = ranks
        self._source = source
        self._destinations = FlatDestinations(destinations)
        self._progress = progress
        self._files: OpenReaders[str] = OpenReaders(source.open_file)
        self._lock = threading.Lock()
        self._failures: dict[int, HoldfastError] = {}  # by the number of the read
        self._loaded = Loaded()
        made: list[Staging] = []
        self._guarded(lambda: made.append(make_staging()))
        self._staging = made[0] if made else HostStaging(1)

    def run_local(self, reads: Sequence[Read]) -> Loaded:
        """Copy this rank's pieces from the page cache, or from memory; needs no communication with other ranks."""
        rank = self._ranks.rank

        def copy(reader: BlockReader, read: Read) -> None:
            reader.copy(read)
            if read.reader == rank:
                self._count(read.bytes)

        mine = [r for r in reads if r.reader == rank or any(rank in portion.receivers() for portion in r.portions)]
        with self._opened():
            self._run_threads(mine, copy)
        return self._loaded

    def run_read(self, reads: Sequence[Read], neighbors: Sequence[int], deadline_s: float) -> Loaded:
        """Perform the reads of this host, whose ranks are `neighbors`. Collective among all ranks."""
        rank = self._ranks.rank
        queue = [read for read in reads if read.reader == rank]
        shared = any(portion.receivers() - {read.reader} for read in reads for portion in read.portions)
        with self._opened():
            if any(run_on_all_ranks(self._ranks, lambda: shared)):
                exchange = WindowExchange(self._ranks, neighbors, PORTION_BYTES, deadline_s)
                self._run_shared(exchange, reads, queue)
            else:
                self._run_threads(queue, self._read_unshared)
        return self._loaded

    def run_passed(self, plan: OncePlan, links: RankLinks) -> Loaded:
        """Perform the reads that one rank makes for all hosts, and pass them on. Collective among all ranks.

        One thread reads and sends, another receives and forwards: so a rank always receives, and no
        two ranks wait for each other.
        """
        transfers = transfers_of(self._ranks.rank, plan)
        own = [transfer for transfer in transfers if transfer.sender is None]
        others = [transfer for transfer in transfers if transfer.sender is not None]

        def run(tasks: Iterator[Callable[[], None]]) -> None:
            for task in tasks:
                task()

        with self._opened():
            tasks = [partial(self._send_all, own, links), partial(self._receive_all, others, links)]
            run_on_threads(len(tasks), "holdfast-pass", tasks, run, self._stop)
            links.meet()
        return self._loaded

    @contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._files.close()
            if self._failures:
                self._loaded.failure = self._failures[min(self._failures)]

    def _count(self, size: int) -> None:
        with self._lock:
            self._loaded.read_bytes += size
            self._progress(size)

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Work unless something has failed; returns True if it succeeded."""
        if not self._failures:
            self._keep_failure(0, work)
        return not self._failures

    def _stop(self) -> None:
        """Let threads that pass portions on come to their end: from now on they only send that they have failed."""
        self._failures.setdefault(0, HoldfastError("the load was interrupted"))

    def _keep_failure(self, number: int, work: Callable[[], None]) -> None:
        """Keep a failure for later: a rank that stops early would leave other ranks waiting."""
        try:
            work()
        except HoldfastError as error:
            self._failures[number] = error
        except Exception as error:  # noqa: BLE001  (other ranks wait for this one, whatever failed)
            self._failures[number] = error_from_record(error_record(error))
            self._failures[number].__cause__ = error

    def _run_threads(self, reads: Sequence[Read], work: Callable[[BlockReader, Read], None]) -> None:
        """Perform the reads in order on several threads, or here if they are few.

        After a failure no further read begins. The reads before it have begun then, so that the first
        failure of all is the same however the threads run.
        """

        def run(tasks: Iterator[tuple[int, Read]]) -> None:
            self._keep_failure(len(reads), partial(perform, tasks))  # buffers that cannot be made, for example

        def perform(tasks: Iterator[tuple[int, Read]]) -> None:
            with self._lent_reader() as reader:
                for number, read in tasks:
                    self._keep_failure(number, partial(work, reader, read))
                    if self._failures:
                        return

        if self._failures:
            return
        threads = min(self._staging.threads, len(reads), 1 + sum(read.bytes for read in reads) // _THREAD_BYTES)
        if threads > 1:
            threads = self._files.most_threads([reads[0].file], threads, self._staging.memory_bytes)
        run_on_threads(threads, "holdfast-read", enumerate(reads), run)

    @contextmanager
    def _lent_reader(self) -> Iterator[BlockReader]:
        with self._staging.lend() as buffers:
            yield self._block_reader(buffers)

    def _block_reader(self, buffers: ThreadBuffers) -> BlockReader:
        return BlockReader(
            self._ranks.rank,
            self._source.path,
            self._files,
            self._destinations,
            buffers,
            self._staging.buffer_bytes,
            self._loaded.touched.add,
        )

    def _read_unshared(self, reader: BlockReader, read: Read) -> None:
        digest = Digest() if read.digest is not None else None
        for portion in read.portions:
            self._read_portion(reader, read, portion, digest)
        if digest is not None:
            check_digest(read, digest.hexdigest(), self._source.path)

    def _read_portion(self, reader: BlockReader, read: Read, portion: Portion, digest: Digest | None) -> None:
        reader.read_portion(read, portion, digest)
        self._count(portion.read_bytes)

    def _run_shared(self, exchange: WindowExchange, reads: Sequence[Read], queue: Sequence[Read]) -> None:
        """Read on one thread, which also passes portions to the other ranks of the host."""
        portions = [(read.reader, portion) for read in reads for portion in read.portions]
        numbers = {id(portion): number for number, (_, portion) in enumerate(portions)}
        rank = self._ranks.rank
        expected = sum(1 for reader, portion in portions if reader != rank and rank in portion.receivers())

        def receive(number: int, window: RawArray) -> None:
            self._guarded(partial(self._scatter, portions[number][1], window))

        with ExitStack() as lent, exchange.opened(expected, receive):
            readers: list[BlockReader] = []
            self._guarded(lambda: readers.append(lent.enter_context(self._lent_reader())))
            for read in queue:
                digest = Digest() if read.digest is not None else None
                for portion in read.portions:
                    receivers = portion.receivers() - {rank}
                    if not receivers:
                        exchange.serve()
                        self._guarded(lambda: self._read_portion(readers[0], read, portion, digest))  # noqa: B023
                    else:
                        slot, window = exchange.free_slot()
                        good = self._guarded(lambda: self._fill(readers[0], window, read, portion, digest))  # noqa: B023
                        exchange.announce(numbers[id(portion)], slot, receivers, good=good)
                        if good and rank in portion.receivers():
                            self._guarded(partial(self._scatter, portion, window))
                if digest is not None:
                    self._guarded(partial(check_digest, read, digest.hexdigest(), self._source.path))

    def _send_all(self, transfers: Sequence[Transfer], links: RankLinks) -> None:
        """Read portions, send them and copy this rank's pieces. After a failure the receivers only learn of it."""
        with self._passing_buffers() as buffers:
            for read, portions in groupby(transfers, key=lambda transfer: transfer.read):
                digest = Digest() if read.digest is not None else None
                for transfer in portions:
                    buffer = buffers.next()
                    good = self._guarded(lambda: self._fill(buffers.reader, buffer, read, transfer.portion, digest))  # noqa: B023
                    send_portion(links, transfer, buffer, good=good)
                    self._guarded(partial(buffers.deliver, buffer, transfer))
                if digest is not None:
                    self._guarded(partial(check_digest, read, digest.hexdigest(), self._source.path))

    def _receive_all(self, transfers: Sequence[Transfer], links: RankLinks) -> None:
        """Receive portions, forward them and copy this rank's pieces."""
        with self._passing_buffers() as buffers:
            for transfer in transfers:
                buffer = buffers.next()
                good = receive_portion(links, transfer, buffer)
                send_portion(links, transfer, buffer, good=good)
                if good:
                    self._guarded(partial(buffers.deliver, buffer, transfer))

    @contextmanager
    def _passing_buffers(self) -> Iterator[_PassingBuffers]:
        """Lend buffers to a thread that passes portions on; a failure to lend or to return them is kept."""
        lent = ExitStack()
        made: list[BlockReader] = []
        self._guarded(lambda: made.append(lent.enter_context(self._lent_reader())))
        try:
            yield _PassingBuffers(made, self._guarded)
        finally:
            self._keep_failure(0, lent.close)

    def _fill(self, reader: BlockReader, buffer: RawArray, read: Read, portion: Portion, digest: Digest | None) -> None:
        """Read a portion for other ranks, too, into a buffer or a window of shared memory."""
        reader.fill(buffer, read, portion, digest)
        self._count(portion.read_bytes)

    def _scatter(self, portion: Portion, window: RawArray) -> None:
        """Copy this rank's pieces from a window."""
        for piece in portion.pieces:
            if piece.rank == self._ranks.rank:
                self._loaded.touched.add(piece.run.place.file)
                self._destinations.put(piece, piece_in_run(window, piece))


class _PassingBuffers:
    """The buffers of a thread that passes portions on. After a failure others still send: a plain one takes it all."""

    def __init__(self, made: Sequence[BlockReader], guarded: Callable[[Callable[[], None]], bool]) -> None:
        self._made = made
        self._guarded = guarded
        self._spare: RawArray | None = None

    def next(self) -> RawArray:
        """Return a buffer to fill with a portion."""
        taken: list[RawArray] = []
        if self._guarded(lambda: taken.append(self.reader.next_buffer())):
            return taken[0]
        if self._spare is None:
            self._spare = aligned_buffer(PORTION_BYTES)
        return self._spare

    @property
    def reader(self) -> BlockReader:
        """The reader of the thread; only where nothing has failed."""
        return self._made[0]

    def deliver(self, buffer: RawArray, transfer: Transfer) -> None:
        self.reader.deliver(buffer, transfer.read, transfer.portion)
