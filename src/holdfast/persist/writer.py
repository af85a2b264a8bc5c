"""The writer process: one per rank, without torch. Takes orders from its trainer, and outlives it.

It maps the arenas of its host, gathers, digests and writes the blocks it owns, and reports
through the storage. When its trainer is gone, it finishes what was captured and leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError, LayoutError, PeerFailed, error_from_record, error_record
from holdfast.core.events import Event
from holdfast.format.digest import Digest
from holdfast.persist import mailbox as mail
from holdfast.persist.arena import Arena, sealed_for, unlink_file
from holdfast.persist.card import Card, card_path
from holdfast.persist.commit import Commit
from holdfast.persist.coordinator import Coordinator, Order
from holdfast.persist.gather import Bytes, Gatherer, copy_bytes, is_direct
from holdfast.persist.mailbox import Mailbox, Watch
from holdfast.plan.jobs import BlockJob, WriterJob, travel_file
from holdfast.storage import storage_at
from holdfast.storage.base import Reader, SharedStorage, Writer

BEAT_S, _FIRST_BEAT_S = 1.0, 0.1
_ORPHAN_POLL_S = 0.2
_GIVEN_UP = "the save was given up because another rank failed"
_NICE = 5  # training comes first
_CAPTURE_POLL_S, _LOOK_S = 0.001, 0.1
_BUFFERS_BYTES = 64 << 20
_SEEN_S, _LAST_WORD_S = 1.0, 10.0  # how long other ranks may take to notice an outcome


class TrainerGone(Exception):
    """The trainer closed its end or died."""


class Trainer:
    """The line to the trainer: one JSON message on each line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._parent = os.getppid()
        self._rest = bytearray()
        self._ready = select.poll()
        self._ready.register(line, select.POLLIN | select.POLLHUP)

    def receive(self) -> dict[str, Any]:
        """The next message; raises TrainerGone when there will be none."""
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            if self._ready.poll(_ORPHAN_POLL_S * 1000):
                data = self._line.recv(1 << 20)
                if not data:
                    raise TrainerGone
                self._rest += data
            elif os.getppid() != self._parent:
                raise TrainerGone  # its forked children may still keep the line open
        message: dict[str, Any] = json.loads(self._rest[:end])
        del self._rest[: end + 1]
        return message

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the work goes on
            self._line.sendall(json.dumps(message).encode() + b"\n")


class Desk:
    """What one plan gives a writer to work with: storage, job, arenas."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.job = WriterJob.from_fields(fields["job"])
        self.job_fields = fields["job"]
        self.commit_fields = fields["commit"]
        self.threads = int(fields["threads"])
        storage = storage_at(fields["storage"])
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
                if self._mailbox.read(mail.OUTCOME) is not None:
                    self.stopped = True
                self._mailbox.post(mail.status(self._rank), fields)


class WriterProcess:
    """The process's life: plans, orders, captures, until the trainer is gone and all is done."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._desk: Desk | None = None
        self._unpublished = False
        self._closing = False

    def run(self) -> None:
        try:
            while not self._closing:
                message = self._trainer.receive()
                self._closing = message["do"] == "close"
                if message["do"] == "plan":
                    self._plan(message["fields"])
                elif message["do"] == "order":
                    self._order(Order(**message["order"]))
        except TrainerGone:
            pass  # what was captured is written by now; what was not was reported as lost
        self._leave(closed=self._closing)

    def _plan(self, fields: Mapping[str, Any]) -> None:
        if self._desk is not None:
            self._desk.close()
        self._desk = Desk(fields)

    def _leave(self, *, closed: bool) -> None:
        """Take the arena away, unless the trainer died and it holds what was never published."""
        if self._desk is None:
            return
        if self._desk.coordinator is not None:
            self._desk.coordinator.sweep(_LAST_WORD_S, give_up=True)
        self._desk.close()
        if closed or not self._unpublished:
            unlink_file(card_path(self._desk.arena_path))
            unlink_file(self._desk.arena_path)

    def _order(self, order: Order) -> None:
        """One save, from the order to its outcome."""
        assert self._desk is not None
        desk, rank = self._desk, self._desk.job.rank
        mailbox = Mailbox(desk.storage, order.attempt)
        self._unpublished = False
        started = time.monotonic()
        with Beat(mailbox, rank, desk.job.bytes) as beat:
            failure = self._begin(desk, order)
            save = Save(desk, order, mailbox, beat)
            captured = False
            try:
                values = self._captured()
                captured = True
                if failure is not None:
                    raise failure
                save.run(values)
            except (HoldfastError, OSError, TrainerGone) as error:
                if captured:
                    self._unpublished = save.keep_in_memory(values)
                failure = failure or _as_failure(error)
                save.report_failure(failure)
            seconds = time.monotonic() - started
            self._trainer.tell(tell="event", event=Event("written", order.step, rank, beat.written, seconds).fields())
            beat.phase = "waiting for the others"
            outcome = self._conclude(desk, order, mailbox, failure)
        with contextlib.suppress(HoldfastError):  # the mailbox goes anyway, a little later
            mailbox.post(mail.seen(rank), True)
        if outcome["error"] is None or outcome["error"][0] == LayoutError.__name__:
            self._unpublished = False  # published, or no state that could be restored
        elif captured and not self._unpublished:
            self._unpublished = save.keep_in_memory(values)
        if not self._unpublished:
            unlink_file(card_path(desk.arena_path))
        if desk.coordinator is not None:
            desk.coordinator.sweep(_SEEN_S)
        self._trainer.tell(tell="outcome", attempt=order.attempt, outcome=outcome)

    def _begin(self, desk: Desk, order: Order) -> HoldfastError | None:
        if desk.coordinator is None:
            return None
        try:
            desk.coordinator.begin(order)
        except (HoldfastError, OSError) as error:
            return _as_failure(error)
        return None

    def _captured(self) -> dict[str, Any]:
        """The values that were captured with the tensors; raises what made the capture fail."""
        while True:
            message = self._trainer.receive()
            if message["do"] == "captured":
                return dict(message["values"])
            if message["do"] == "abandon":
                raise error_from_record(message["error"])
            self._closing = self._closing or message["do"] == "close"

    def _conclude(self, desk: Desk, order: Order, mailbox: Mailbox, failure: HoldfastError | None) -> dict[str, Any]:
        if desk.coordinator is not None:
            fresh = False
            if failure is None:
                try:
                    fresh = desk.coordinator.finish(order)
                except (HoldfastError, OSError) as error:
                    failure = _as_failure(error)
            try:
                return desk.coordinator.conclude(order, failure, fresh=fresh)
            except (HoldfastError, OSError) as error:
                return {"error": error_record(failure or _as_failure(error)), "fresh": False}
        try:
            watch = Watch(mailbox, order.deadline_s, order.silence_s)
            watch.wait(lambda names: mail.OUTCOME in names, lambda names: [0], "the coordinator's outcome")
            outcome = mailbox.read(mail.OUTCOME)
            if outcome is None:
                raise PeerFailed("the outcome of the save was taken away before this rank read it")
            return dict(outcome)
        except (HoldfastError, OSError) as error:
            return {"error": error_record(failure or _as_failure(error)), "fresh": False}


def _as_failure(error: BaseException) -> HoldfastError:
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, TrainerGone):
        return PeerFailed("the trainer died before its state was captured")
    return error_from_record(error_record(error))


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
        self._await([mail.BEGUN], "the attempt's folder", [0])
        self._await_captures()
        self._give()
        self._write([block for block in self._job.blocks if not block.far], {})
        distant = [block for block in self._job.blocks if block.far]
        if distant:
            givers = self._job.givers
            self._await([mail.gave(giver) for giver in givers], "bytes from other hosts", givers)
            travelled = {giver: self._take(giver) for giver in givers}
            try:
                self._write(distant, travelled)
            finally:
                for reader in travelled.values():
                    reader.close()
        if not all(map(self._is_filled, self._givers_here())):
            raise PeerFailed("an arena was filled anew while it was being written: this save was given up")
        self._card(values).write()
        self._mailbox.post(
            mail.report(self._job.rank), {"plan": self._job.plan, "blocks": self._reports(), "values": dict(values)}
        )

    def _await(self, wanted: list[str], what: str, ranks: list[int]) -> None:
        def there(names: set[str]) -> bool:
            if mail.OUTCOME in names:
                raise PeerFailed(_GIVEN_UP)
            for rank in ranks:
                answer = self._mailbox.read(mail.report(rank)) if mail.report(rank) in names else None
                if answer is not None and answer.get("error"):
                    raise error_from_record(answer["error"])  # what is waited for will not come
            return names.issuperset(wanted)

        self._watch.wait(there, lambda names: ranks, what)

    def _givers_here(self) -> set[int]:
        return {copy.giver for block in self._job.blocks for copy in block.near}

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
        return sealed_for(self._desk.arenas[rank]) == self._order.attempt

    def _give(self) -> None:
        """Leave what writers of other hosts need in the attempt's folder."""
        own = self._desk.arenas[self._job.rank]
        for travel in self._job.travel:
            area = np.zeros(travel.size, dtype=np.uint8)
            for copy in travel.copies:
                copy_bytes(copy, own, area)
            name = travel_file(self._job.rank, travel.host)
            self._desk.storage.create(self._order.attempt, name, travel.size)
            writer = self._desk.storage.writer(self._order.attempt, name)
            try:
                writer.write(0, [area.data])
            finally:
                writer.close()
        if self._job.travel:
            self._mailbox.post(mail.gave(self._job.rank), self._job.plan)

    def _take(self, giver: int) -> Reader:
        return self._desk.storage.take(self._order.attempt, travel_file(giver, self._job.host))

    def _write(self, blocks: list[BlockJob], travelled: Mapping[int, Reader]) -> None:
        """Write blocks on a few threads, and sync each file when its last block is written."""
        threads = self._threads(blocks)
        local = threading.local()
        writers: dict[str, Writer] = {}
        storage, attempt = self._desk.storage, self._order.attempt

        def write(block: BlockJob) -> None:
            if self._beat.stopped:
                raise PeerFailed(_GIVEN_UP)
            if not hasattr(local, "gatherer"):
                local.gatherer = Gatherer(self._desk.arenas, travelled)
            buffers = local.gatherer.block(block)
            writers[block.file].write(block.offset, buffers)
            self._note_digest(block, buffers)
            self._beat.written += block.size

        try:
            for file in {block.file: None for block in blocks}:
                writers[file] = storage.writer(attempt, file)
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(write, blocks):
                    pass
                self._beat.phase = "syncing"
                for _ in pool.map(lambda writer: writer.sync(), writers.values()):
                    pass
        finally:
            for writer in writers.values():
                writer.close()

    def _threads(self, blocks: list[BlockJob]) -> int:
        largest = max((block.size for block in blocks if not is_direct(block)), default=0)
        return max(1, min(self._desk.threads, _BUFFERS_BYTES // largest if largest else self._desk.threads))

    def _note_digest(self, block: BlockJob, buffers: list[memoryview]) -> None:
        digest = Digest()
        for buffer in buffers:
            digest.update(buffer)
        self._digests[block.file, block.offset] = digest.hex()

    def _reports(self) -> list[list[Any]]:
        return [
            [block.file, block.offset, block.size, self._digests[block.file, block.offset]]
            for block in self._job.blocks
        ]

    def _card(self, values: Mapping[str, Any]) -> Card:
        desk, order = self._desk, self._order
        return Card(
            order.attempt,
            order.step,
            order.parent,
            self._job.rank,
            desk.arena_path,
            desk.job_fields,
            desk.commit_fields,
            self._reports(),
            values,
        )

    def keep_in_memory(self, values: Mapping[str, Any]) -> bool:
        """Digest what could not be written, so that the arena can be restored from; False if it cannot be."""
        try:
            gatherer = Gatherer(self._desk.arenas, {})
            for block in self._job.blocks:
                if (block.file, block.offset) not in self._digests:
                    if block.far:
                        return False  # bytes of other hosts are not in this host's memory
                    self._note_digest(block, gatherer.block(block))
            if not all(map(self._is_filled, self._givers_here())):
                return False  # another rank's part was never captured
            self._card(values).write()
        except (HoldfastError, OSError):
            return False
        return True

    def report_failure(self, failure: HoldfastError) -> None:
        with contextlib.suppress(HoldfastError, OSError):  # then the others notice this writer's silence
            self._await_mailbox()
            self._mailbox.post(mail.report(self._job.rank), {"plan": self._job.plan, "error": error_record(failure)})

    def _await_mailbox(self) -> None:
        """A short wait: rank 0's writer may be about to make the mailbox."""
        end = time.monotonic() + 5.0
        while not self._mailbox.names() and time.monotonic() < end:
            time.sleep(0.02)


def main(line: int) -> None:
    """Run the writer whose trainer holds the other end of `line`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves when its work is done, not when launchers tidy up
    os.nice(_NICE)
    with socket.socket(fileno=line) as connection:
        WriterProcess(Trainer(connection)).run()
