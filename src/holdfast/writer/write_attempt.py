"""A rank's share of an attempt: write travel files and blocks on threads, report them, or keep them in memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from holdfast.checkpoint.attempt import Attempt, new_attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.gather import Gatherer, write_travel_file
from holdfast.checkpoint.shared_memory import Arena, sealed_attempt, unlink_file
from holdfast.core.errors import Damaged, HoldfastError, PeerFailed
from holdfast.core.ranks import host_identity
from holdfast.format.digest import Digest
from holdfast.plan.writer_job import BlockJob, travel_file
from holdfast.storage import Storage, storage_at
from holdfast.storage.base import Reader, SharedStorage
from holdfast.storage.open_files import LazyReaders
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_card import Card, card_path, has_card
from holdfast.writer.arena_fragments import Bytes, arena_fragment, block_fragments, is_direct
from holdfast.writer.coordinator import Coordinator
from holdfast.writer.mailbox import Heartbeat, Mailbox, Watch
from holdfast.writer.messages import AssignJob, Failure, RankReport, SaveOrder, Values

_ABANDONED = "the save was given up because another rank failed"
_CAPTURE_POLL_S, _MAILBOX_POLL_S = 0.001, 0.1
_BUFFERS_BYTES = 64 << 20
_MAILBOX_S = 5.0
_NEIGHBOUR_S = 5.0  # another rank of this host may still be capturing


class Workspace:
    """The resources of one plan: storage, job, arenas, and on rank 0 the coordinator.

    For a state that an earlier process captured, also the digests on its card.
    """

    def __init__(self, assignment: AssignJob, open_storage: Callable[[str], Storage] = storage_at) -> None:
        self.job = job = assignment.job
        self.commit = assignment.commit
        self.threads = assignment.threads
        self.root = assignment.root
        storage = open_storage(assignment.storage)
        assert isinstance(storage, SharedStorage)
        self.storage = storage
        self.arena_path = assignment.arenas[job.rank]
        self._arenas = {
            rank: Arena(path, job.arena_bytes[rank], hold=True, writable=False)
            for rank, path in assignment.arenas.items()
        }
        self.arenas: dict[int, Bytes] = {rank: arena.bytes for rank, arena in self._arenas.items()}
        commit = assignment.commit
        self.coordinator = None if commit is None else Coordinator(storage, commit, job.plan)
        self.known_digests = {(report.file, report.offset): report.digest for report in assignment.reports}
        self.arena_digest = assignment.arena_digest

    def has_card(self) -> bool:
        """Return True if the arena holds a state that was captured and not published."""
        return has_card(self.arena_path)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()


class AttemptWriter:
    """Writes one rank's share of one attempt."""

    def __init__(self, workspace: Workspace, order: SaveOrder, mailbox: Mailbox, heartbeat: Heartbeat) -> None:
        self._workspace = workspace
        self._job = workspace.job
        self._order = order
        self._mailbox = mailbox
        self._heartbeat = heartbeat
        self._watch = Watch(mailbox, order.deadline_s, order.silence_s)
        self._written: dict[tuple[str, int], BlockReport] = {}
        self.is_adopted = workspace.has_card()  # an earlier process captured the state, and its card stays as it is

    def run(self, values: Values) -> None:
        """Write this rank's blocks, make them durable and report them."""
        self._heartbeat.phase = "writing"
        if self._workspace.coordinator is None:  # otherwise this process has begun the attempt
            self._await([mail.BEGUN], "the attempt's folder", [0], self._probe_storage())
        self._await_captures()
        if self._workspace.arena_digest not in ("", self._own_digest()):
            raise Damaged("the memory of this host is not what was captured: its digest differs")
        self._write_travel_files()
        early, late = self._by_distance()
        self._write(early, {})
        if late:
            ranks = self._job.source_ranks
            self._await([mail.gave(rank) for rank in ranks], "bytes from other hosts", ranks)
            travel_files = LazyReaders(ranks, self._open_travel_file)
            try:
                self._write(late, travel_files)
            finally:
                travel_files.close()
        if not all(map(self._is_filled, self._local_ranks())):
            raise PeerFailed("an arena was filled anew while it was being written: this save was given up")
        if not self.is_adopted and not self._write_card(values):
            unlink_file(card_path(self._workspace.arena_path))  # a full memory: this state cannot be restored from it
        self._mailbox.post_report(self._job.rank, RankReport(self._job.plan, self._reports(), values))

    def _by_distance(self) -> tuple[list[BlockJob], list[BlockJob]]:
        """Return the blocks that need only bytes of this host, and the others.

        In a storage that writes whole files, one block of the second kind makes the whole file late.
        """
        late_files = {block.file for block in self._job.blocks if block.remote}
        blocks: tuple[list[BlockJob], list[BlockJob]] = ([], [])
        for block in self._job.blocks:
            is_late = block.file in late_files if self._workspace.storage.whole_files else bool(block.remote)
            blocks[is_late].append(block)
        return blocks

    def _probe_storage(self) -> Callable[[set[str]], None]:
        """Return a check of the notes that raises if there are none for a while and the storage takes no new folder.

        Then the writer of rank 0 cannot say why there are none.
        """
        probe_at = time.monotonic() + _MAILBOX_S
        probed = False

        def probe(names: set[str]) -> None:
            nonlocal probed
            if not names and not probed and time.monotonic() > probe_at:
                probed = True
                folder = new_attempt()
                self._workspace.storage.begin(folder)
                self._workspace.storage.discard(folder)

        return probe

    def _await(
        self, wanted: list[str], what: str, ranks: list[int], check: Callable[[set[str]], None] = lambda names: None
    ) -> None:
        """Wait for notes of other ranks; raises the error of a rank that failed, or of `check`."""

        def are_posted(names: set[str]) -> bool:
            check(names)
            if mail.OUTCOME in names:
                raise PeerFailed(_ABANDONED)
            for rank in ranks:
                report = self._mailbox.report_of(rank) if mail.report(rank) in names else None
                if report is not None and report.failure is not None:
                    raise report.failure.error()
            return names.issuperset(wanted)

        self._watch.wait(are_posted, lambda names: ranks, what)

    def _local_ranks(self) -> set[int]:
        """Return the ranks of this host whose arenas this writer reads."""
        return {copy.source_rank for block in self._job.blocks for copy in block.local}

    def _await_captures(self) -> None:
        """Wait until the arenas that this writer reads are filled: each trainer captures at its own pace."""
        waiting = self._local_ranks()
        check_at = time.monotonic() + _MAILBOX_POLL_S
        while waiting := {rank for rank in waiting if not self._is_filled(rank)}:
            if self._heartbeat.stopped:
                raise PeerFailed(_ABANDONED)
            if time.monotonic() > check_at:
                self._await([], "captures", sorted(waiting))
                self._watch.check(sorted(waiting), "the captures of this host's ranks")
                check_at = time.monotonic() + _MAILBOX_POLL_S
            time.sleep(_CAPTURE_POLL_S)

    def _is_filled(self, rank: int) -> bool:
        return sealed_attempt(self._workspace.arenas[rank]) == self._order.attempt

    def _write_travel_files(self) -> None:
        """Write the bytes that writers of other hosts need to the attempt's folder."""
        own = self._workspace.arenas[self._job.rank]
        for travel in self._job.travel:
            name = travel_file(self._job.rank, travel.host)
            fragments = (arena_fragment(copy, own) for copy in travel.copies)
            write_travel_file(self._workspace.storage, self._order.attempt, name, travel.size, fragments)
        if self._job.travel:
            self._mailbox.post_gave(self._job.rank, self._job.plan)

    def _open_travel_file(self, rank: int) -> Reader:
        return self._workspace.storage.take(self._order.attempt, travel_file(rank, self._job.host))

    def _write(self, blocks: list[BlockJob], travel_files: Mapping[int, Reader]) -> None:
        """Write blocks on a few threads and sync their files."""

        def gatherer() -> Callable[[BlockJob], Iterator[memoryview]]:
            own = Gatherer()

            def gather(block: BlockJob) -> Iterator[memoryview]:
                if self._heartbeat.stopped:
                    raise PeerFailed(_ABANDONED)
                return own.block(block, block_fragments(block, self._workspace.arenas, travel_files))

            return gather

        def done(report: BlockReport) -> None:
            self._record(report)
            self._heartbeat.written += report.size

        attempt = Attempt(self._workspace.storage, self._order.attempt, self._order.folder)
        attempt.write(blocks, gatherer, self._threads(blocks), done)

    def _threads(self, blocks: list[BlockJob]) -> int:
        largest = max((block.size for block in blocks if not is_direct(block)), default=0)
        threads = self._workspace.threads
        return max(1, min(threads, _BUFFERS_BYTES // largest if largest else threads))

    def _record(self, report: BlockReport) -> None:
        """Record a block's digest; raises Damaged if it differs from the digest on the card."""
        block = (report.file, report.offset)
        if self._workspace.known_digests.get(block, report.digest) != report.digest:
            raise Damaged(f"{report.file} at {report.offset}: the memory of this host is not what was captured")
        self._written[block] = report

    def _own_digest(self) -> str:
        digest = Digest()
        digest.update(self._workspace.arenas[self._job.rank].data)
        return digest.hexdigest()

    def _reports(self) -> tuple[BlockReport, ...]:
        blocks = [(block.file, block.offset) for block in self._job.blocks]
        return tuple(self._written[block] for block in blocks if block in self._written)

    def _write_card(self, values: Values, arena_digest: str = "") -> bool:
        """Write the card of this rank's arena; return False if that fails."""
        workspace, order = self._workspace, self._order
        if not workspace.root:
            return False  # a state without the identity of its root is never restored
        card = Card(
            attempt=order.attempt,
            lineage=order.lineage,
            rank=self._job.rank,
            arena=workspace.arena_path,
            job=self._job,
            commit=workspace.commit,
            reports=self._reports(),
            values=values,
            arena_digest=arena_digest,
            host=host_identity(),
            root=workspace.root,
        )
        try:
            card.write()
        except (HoldfastError, OSError):
            return False
        return True

    def keep_in_memory(self, values: Values) -> bool:
        """Digest the blocks that were not written and write a card, so that the arena can be restored from.

        Blocks with bytes of other hosts may have no digest; then the whole arena has one. Returns False on failure.
        """
        if self.is_adopted:
            return True
        if not self._is_filled(self._job.rank) or self._workspace.arena_digest not in ("", self._own_digest()):
            return False
        end = time.monotonic() + _NEIGHBOUR_S
        while not all(map(self._is_filled, self._local_ranks())):
            if time.monotonic() > end:
                return False  # another rank's share was never captured
            time.sleep(_CAPTURE_POLL_S)
        try:
            gatherer = Gatherer()
            for block in self._job.blocks:
                if (block.file, block.offset) not in self._written and not block.remote:
                    digest = Digest()
                    for buffer in gatherer.block(block, block_fragments(block, self._workspace.arenas, {})):
                        digest.update(buffer)
                    self._record(BlockReport(block.file, block.offset, block.size, digest.hexdigest()))
        except (HoldfastError, OSError):
            return False
        several_hosts = bool(self._job.travel or self._job.source_ranks)
        return self._write_card(values, self._own_digest() if several_hosts else "")

    def report_failure(self, failure: HoldfastError) -> None:
        with contextlib.suppress(HoldfastError, OSError):  # the others notice that this writer is silent
            self._await_mailbox()
            report = RankReport(self._job.plan, failure=Failure.of(failure))
            self._mailbox.post_report(self._job.rank, report)

    def _await_mailbox(self) -> None:
        """Wait a short time for rank 0's writer to create the mailbox."""
        end = time.monotonic() + _MAILBOX_S
        while not self._mailbox.names() and time.monotonic() < end:
            time.sleep(self._workspace.storage.poll_s)
