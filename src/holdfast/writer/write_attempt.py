"""A rank's part in an attempt: gather, digest and write its blocks, report them, or keep them in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.checkpoint.commit import Commit
from holdfast.checkpoint.shared_memory import Arena, sealed_attempt, unlink_file
from holdfast.core.errors import Damaged, HoldfastError, PeerFailed, error_from_record, error_record
from holdfast.core.host import host_identity
from holdfast.format.digest import Digest
from holdfast.plan.writer_job import BlockJob, TravelJob, WriterJob, travel_file
from holdfast.storage import Storage, storage_at
from holdfast.storage.base import Reader, SharedStorage, Writer
from holdfast.storage.open_files import BlockWriters, LazyReaders
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_card import Card, card_path
from holdfast.writer.coordinator import Coordinator, Order
from holdfast.writer.gather import Bytes, Gatherer, copy_bytes, is_direct
from holdfast.writer.mailbox import Mailbox, Watch

BEAT_S, _FIRST_BEAT_S = 1.0, 0.1
_GIVEN_UP = "the save was given up because another rank failed"
_CAPTURE_POLL_S, _LOOK_S = 0.001, 0.1
_BUFFERS_BYTES = 64 << 20
_TRAVEL_BYTES = 32 << 20
_MAILBOX_S = 5.0
_NEIGHBOUR_S = 5.0  # a rank of this host may still be capturing


class Desk:
    """What one plan gives a writer to work with: storage, job, arenas.

    For what an earlier life captured there are also the digests that its card has.
    """

    def __init__(self, fields: Mapping[str, Any], open_storage: Callable[[str], Storage] = storage_at) -> None:
        self.job = WriterJob.from_fields(fields["job"])
        self.job_fields = fields["job"]
        self.commit_fields = fields["commit"]
        self.threads = int(fields["threads"])
        storage = open_storage(fields["storage"])
        assert isinstance(storage, SharedStorage)
        self.storage = storage
        self.arena_path: str = fields["arenas"][str(self.job.rank)]
        self._held = [
            Arena(path, self.job.arena_bytes[int(rank)], hold=True, writable=False)
            for rank, path in fields["arenas"].items()
        ]
        self.arenas: dict[int, Bytes] = {
            int(rank): arena.bytes for rank, arena in zip(fields["arenas"], self._held, strict=True)
        }
        commit = self.commit_fields
        self.coordinator = Coordinator(storage, Commit.from_fields(commit), self.job.plan) if commit else None
        self.known_digests = {(file, offset): digest for file, offset, _, digest in fields.get("reports", ())}
        self.arena_digest: str = fields.get("arena_digest", "")
        self.root: str = fields["root"]

    def close(self) -> None:
        for arena in self._held:
            arena.close()


class Beat:
    """Shows that this writer lives and how far it is, and hears when the save is over elsewhere."""

    def __init__(self, mailbox: Mailbox, rank: int, total: int) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._total = total
        self._end = threading.Event()
        self.written = 0
        self.phase = "waiting for the capture"
        self.stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._end.wait(BEAT_S if number else _FIRST_BEAT_S):
            number += 1
            fields = {"beat": number, "phase": self.phase, "written": self.written, "total": self._total}
            with contextlib.suppress(HoldfastError):  # before the mailbox is made, and after it is gone
                if self._mailbox.outcome() is not None:
                    self.stopped = True
                self._mailbox.post(mail.status(self._rank), fields)


class Save:
    """The writing of one attempt by one rank's writer."""

    def __init__(self, desk: Desk, order: Order, mailbox: Mailbox, beat: Beat) -> None:
        self._desk = desk
        self._job = desk.job
        self._order = order
        self._mailbox = mailbox
        self._beat = beat
        self._watch = Watch(mailbox, order.deadline_s, order.silence_s)
        self._digests: dict[tuple[str, int], str] = {}

    def run(self, values: Mapping[str, Any]) -> None:
        """Write this rank's blocks, make them durable and report them."""
        self._beat.phase = "writing"
        if self._desk.coordinator is None:  # else this process has begun it
            self._await([mail.BEGUN], "the attempt's folder", [0])
        self._await_captures()
        if self._desk.arena_digest not in ("", self._own_digest()):
            raise Damaged("the memory of this host is not what was captured: its digest differs")
        self._give()
        near, distant = self._by_distance()
        self._write(near, {})
        if distant:
            givers = self._job.source_ranks
            self._await([mail.gave(giver) for giver in givers], "bytes from other hosts", givers)
            travelled = LazyReaders(givers, self._take)
            try:
                self._write(distant, travelled)
            finally:
                travelled.close()
        if not all(map(self._is_filled, self._givers_here())):
            raise PeerFailed("an arena was filled anew while it was being written: this save was given up")
        if not self._keep(values):
            unlink_file(card_path(self._desk.arena_path))  # no room for the card: the memory tier does without
        self._mailbox.post(
            mail.report(self._job.rank), {"plan": self._job.plan, "blocks": self._reports(), "values": dict(values)}
        )

    def _by_distance(self) -> tuple[list[BlockJob], list[BlockJob]]:
        """The blocks that this host has all of, and those that wait for others: of a file written whole, all."""
        late = {block.file for block in self._job.blocks if block.remote}
        blocks: tuple[list[BlockJob], list[BlockJob]] = ([], [])
        for block in self._job.blocks:
            waits = block.file in late if self._desk.storage.whole_files else bool(block.remote)
            blocks[waits].append(block)
        return blocks

    def _await(self, wanted: list[str], what: str, ranks: list[int]) -> None:
        def there(names: set[str]) -> bool:
            if mail.OUTCOME in names:
                raise PeerFailed(_GIVEN_UP)
            for rank in ranks:
                answer = self._mailbox.report_of(rank) if mail.report(rank) in names else None
                if answer is not None and answer.get("error"):
                    raise error_from_record(answer["error"])  # what is waited for will not come
            return names.issuperset(wanted)

        self._watch.wait(there, lambda names: ranks, what)

    def _givers_here(self) -> set[int]:
        return {copy.source_rank for block in self._job.blocks for copy in block.local}

    def _await_captures(self) -> None:
        """Wait until the arenas that this writer reads are filled: each trainer goes at its own pace."""
        waiting = self._givers_here()
        look_at = time.monotonic() + _LOOK_S
        while waiting := {rank for rank in waiting if not self._is_filled(rank)}:
            if self._beat.stopped:
                raise PeerFailed(_GIVEN_UP)
            if time.monotonic() > look_at:
                self._await([], "captures", sorted(waiting))
                self._watch.check(sorted(waiting), "the captures of this host's ranks")
                look_at = time.monotonic() + _LOOK_S
            time.sleep(_CAPTURE_POLL_S)

    def _is_filled(self, rank: int) -> bool:
        return sealed_attempt(self._desk.arenas[rank]) == self._order.attempt

    def _give(self) -> None:
        """Leave what writers of other hosts need in the attempt's folder."""
        for travel in self._job.travel:
            name = travel_file(self._job.rank, travel.host)
            self._desk.storage.create(self._order.attempt, name, travel.size)
            writer = self._desk.storage.writer(self._order.attempt, name)
            try:
                self._fill(writer, travel)
                if self._desk.storage.whole_files:
                    writer.sync()
            finally:
                writer.close()
        if self._job.travel:
            self._mailbox.post(mail.gave(self._job.rank), self._job.plan)

    def _fill(self, writer: Writer, travel: TravelJob) -> None:
        """Write a travel file, a few of its copies at a time."""
        own = self._desk.arenas[self._job.rank]
        copies = list(travel.copies)
        begin = 0
        while copies:
            count = sum(1 for copy in copies if copy.target + copy.bytes - begin <= _TRAVEL_BYTES) or 1
            area = np.zeros(copies[count - 1].target + copies[count - 1].bytes - begin, dtype=np.uint8)
            for copy in copies[:count]:
                copy_bytes(replace(copy, target=copy.target - begin), own, area)
            writer.write(begin, [area.data])
            begin += area.size
            del copies[:count]

    def _take(self, giver: int) -> Reader:
        return self._desk.storage.take(self._order.attempt, travel_file(giver, self._job.host))

    def _write(self, blocks: list[BlockJob], travelled: Mapping[int, Reader]) -> None:
        """Write blocks on a few threads and sync their files; a file that is written whole is one thread's."""
        threads = self._threads(blocks)
        local = threading.local()
        storage, attempt = self._desk.storage, self._order.attempt
        writers = BlockWriters(lambda file: storage.writer(attempt, file), (block.file for block in blocks))
        files = _by_file(blocks)
        parts = list(files) if storage.whole_files else [[block] for file in files for block in file]

        def write_part(part: list[BlockJob]) -> None:
            for block in part:
                write(block)

        def write(block: BlockJob) -> None:
            if self._beat.stopped:
                raise PeerFailed(_GIVEN_UP)
            if not hasattr(local, "gatherer"):
                local.gatherer = Gatherer(self._desk.arenas, travelled)
            buffers = local.gatherer.block(block)
            with writers.block(block.file) as writer:
                writer.write(block.offset, buffers)
                self._note_digest(block, buffers)
            self._beat.written += block.size

        try:
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(write_part, parts):
                    pass
        finally:
            writers.close()

    def _threads(self, blocks: list[BlockJob]) -> int:
        largest = max((block.size for block in blocks if not is_direct(block)), default=0)
        return max(1, min(self._desk.threads, _BUFFERS_BYTES // largest if largest else self._desk.threads))

    def _note_digest(self, block: BlockJob, buffers: list[memoryview]) -> None:
        digest = Digest()
        for buffer in buffers:
            digest.update(buffer)
        self._digests[block.file, block.offset] = found = digest.hex()
        if self._desk.known_digests.get((block.file, block.offset), found) != found:
            raise Damaged(f"{block.file} at {block.offset}: the memory of this host is not what was captured")

    def _own_digest(self) -> str:
        digest = Digest()
        digest.update(self._desk.arenas[self._job.rank].data)
        return digest.hex()

    def _reports(self) -> list[list[Any]]:
        return [
            [block.file, block.offset, block.size, self._digests[block.file, block.offset]]
            for block in self._job.blocks
            if (block.file, block.offset) in self._digests
        ]

    def _card(self, values: Mapping[str, Any], arena_digest: str) -> Card:
        desk, order = self._desk, self._order
        return Card(
            order.attempt,
            order.lineage.fields(),
            self._job.rank,
            desk.arena_path,
            desk.job_fields,
            desk.commit_fields,
            self._reports(),
            values,
            arena_digest,
            host_identity(),
            desk.root,
        )

    def _keep(self, values: Mapping[str, Any], arena_digest: str = "") -> bool:
        if not self._desk.root:
            return False  # nobody could tell whose state it is
        try:
            self._card(values, arena_digest).write()
        except (HoldfastError, OSError):
            return False
        return True

    def keep_in_memory(self, values: Mapping[str, Any]) -> bool:
        """Digest what could not be written, so that the arena can be restored from; False if it cannot be.

        Of blocks with bytes of other hosts there may be no digest; then the arena has one.
        """
        if not self._is_filled(self._job.rank) or self._desk.arena_digest not in ("", self._own_digest()):
            return False
        end = time.monotonic() + _NEIGHBOUR_S
        while not all(map(self._is_filled, self._givers_here())):
            if time.monotonic() > end:
                return False  # another rank's part was never captured
            time.sleep(_CAPTURE_POLL_S)
        try:
            gatherer = Gatherer(self._desk.arenas, {})
            for block in self._job.blocks:
                if (block.file, block.offset) not in self._digests and not block.remote:
                    self._note_digest(block, gatherer.block(block))
        except (HoldfastError, OSError):
            return False
        several_hosts = bool(self._job.travel or self._job.source_ranks)
        return self._keep(values, self._own_digest() if several_hosts else "")

    def report_failure(self, failure: HoldfastError) -> None:
        with contextlib.suppress(HoldfastError, OSError):  # then the others notice this writer's silence
            self._await_mailbox()
            self._mailbox.post(mail.report(self._job.rank), {"plan": self._job.plan, "error": error_record(failure)})

    def _await_mailbox(self) -> None:
        """A short wait: rank 0's writer may be about to make the mailbox."""
        end = time.monotonic() + _MAILBOX_S
        while not self._mailbox.names() and time.monotonic() < end:
            time.sleep(self._desk.storage.poll_s)


def _by_file(blocks: list[BlockJob]) -> Iterable[list[BlockJob]]:
    """The blocks of each file together, in the order of their bytes."""
    files: dict[str, list[BlockJob]] = {}
    for block in sorted(blocks, key=lambda block: block.offset):
        files.setdefault(block.file, []).append(block)
    return files.values()
