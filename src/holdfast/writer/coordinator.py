"""The coordinator, rank 0's writer: begin an attempt, collect reports, publish, retention, delete removed steps."""

from __future__ import annotations

import contextlib
import threading
import time

from holdfast.checkpoint import retention
from holdfast.checkpoint.attempt import Attempt, check_replaceable, publish
from holdfast.checkpoint.commit import Commit, SaveTimes
from holdfast.checkpoint.retention import RetentionIndex
from holdfast.core.errors import HoldfastError, LayoutError, StorageError
from holdfast.core.events import Event
from holdfast.core.ranks import host_identity
from holdfast.keep import Policy
from holdfast.plan.writer_job import is_travel_file
from holdfast.storage.base import Hold, SharedStorage, Tracked
from holdfast.writer import mailbox as mail
from holdfast.writer.mailbox import Mailbox, Watch
from holdfast.writer.messages import Failure, Outcome, RankReport, SaveOrder, SaveStarted


class Coordinator:
    """Commits the saves of one plan, and keeps each mailbox until all ranks have read the outcome."""

    def __init__(self, storage: SharedStorage, commit: Commit, plan: str) -> None:
        self._storage = storage
        self._commit = commit
        self._plan = plan
        self._started = 0.0
        self._hold: Hold | None = None
        self._last_mailbox: Mailbox | None = None
        self._deleter: threading.Thread | None = None
        self._retention = RetentionIndex(storage)
        self._retention_events: list[Event] = []  # for the trainer

    def begin(self, order: SaveOrder) -> None:
        """Create the mailbox, the attempt's folder and its files."""
        self._started = time.monotonic()
        if self._last_mailbox is not None:
            self._last_mailbox.discard()  # a new save begins only after every rank has read the last outcome
            self._last_mailbox = None
        mailbox = Mailbox(self._storage, order.attempt)
        mailbox.make()
        self._hold = self._storage.hold(mailbox.folder)
        mailbox.post_host(host_identity())
        files = [(file.name, file.size) for file in self._commit.files]
        check_replaceable(self._storage, order.folder)
        self._attempt(order).create(files)
        mailbox.post_begun(SaveStarted(order.step, self._commit.world, sum(size for _, size in files)))

    def _attempt(self, order: SaveOrder) -> Attempt:
        return Attempt(self._storage, order.attempt, order.folder)

    def finish(self, order: SaveOrder, stall_ms: float | None = None) -> None:
        """Wait for every rank's report, commit and publish."""
        reports = self._reports(order)
        plans = {report.plan for report in reports}
        if plans != {self._plan}:
            raise LayoutError(f"the ranks wrote by {len(plans)} different plans: nothing is published")
        blocks = [block for report in reports for block in report.blocks]
        values = [report.values or {} for report in reports]
        times = SaveTimes(round(time.monotonic() - self._started, 3), stall_ms and round(stall_ms, 1))
        manifest, small = self._commit.manifest(order.attempt, order.lineage, blocks, values, times)
        for name in self._storage.files(order.attempt) if self._commit.hosts > 1 else ():
            if is_travel_file(name):
                self._storage.drop(order.attempt, name)
        publish(self._attempt(order), manifest, small)
        keep = None if order.keep is None else Policy.from_fields(order.keep)
        applied = retention.apply(self._storage, keep, order.step, self._retention)
        self._retention_events += applied.events(order.step)

    def _reports(self, order: SaveOrder) -> list[RankReport]:
        mailbox = Mailbox(self._storage, order.attempt)
        world = self._commit.world
        found: dict[int, RankReport] = {}

        def all_reported(names: set[str]) -> bool:
            for rank in range(world):
                if rank not in found and mail.report(rank) in names:
                    report = mailbox.report_of(rank)
                    if report is not None and report.failure is not None:
                        kind, message = report.failure.kind, report.failure.message
                        raise Failure(kind, message if world == 1 else f"rank {rank}: {message}").error()
                    if report is not None:
                        found[rank] = report
            return len(found) == world

        def missing(names: set[str]) -> list[int]:
            return [rank for rank in range(world) if rank not in found]

        watch = Watch(mailbox, order.deadline_s, order.silence_s, self._started)
        watch.wait(all_reported, missing, "the reports of all writers")
        return [found[rank] for rank in range(world)]

    def conclude(self, order: SaveOrder, failure: HoldfastError | None) -> Outcome:
        """Post the outcome for every rank. Of a failed attempt, only the outcome remains."""
        outcome = Outcome(None if failure is None else Failure.of(failure))
        if failure is not None:
            self._attempt(order).discard()
        self._last_mailbox = Mailbox(self._storage, order.attempt)
        try:
            self._last_mailbox.post_outcome(outcome)
        finally:
            if self._hold is not None:
                self._hold.release()
                self._hold = None
        return outcome

    def finish_retention(self) -> tuple[Event, ...]:
        """Return what retention did. Removed checkpoints are deleted while the next save begins."""
        events, self._retention_events = tuple(self._retention_events), []
        if any(event.name == "removed" for event in events):
            self.delete_removed()
        return events

    def delete_removed(self) -> None:
        """Delete the checkpoints that retention removed, on a thread, so that the next save need not wait."""
        self.join()
        self._deleter = threading.Thread(target=self._delete_removed, daemon=True)
        self._deleter.start()

    def _delete_removed(self) -> None:
        with contextlib.suppress(HoldfastError, OSError):  # the next save, or the next start, tries again
            if isinstance(self._storage, Tracked):
                self._storage.sweep_some()
            else:
                self._storage.sweep()

    def join(self) -> None:
        if self._deleter is not None:
            self._deleter.join()

    def sweep(self, wait_s: float = 0.0, *, give_up: bool = False) -> None:
        """Delete the last mailbox once every rank has read the outcome.

        Waits up to `wait_s`. With `give_up`, the mailbox is deleted then in any case.
        """
        end = time.monotonic() + wait_s
        while self._last_mailbox is not None:
            try:
                names = self._last_mailbox.names() if self._commit.world > 1 else set()
            except StorageError:  # the storage is unavailable: the next start deletes the mailbox
                self._last_mailbox = None
                return
            late = time.monotonic() >= end
            if all(mail.seen(rank) in names for rank in range(1, self._commit.world)) or (late and give_up):
                self._last_mailbox.discard()
                self._last_mailbox = None
            elif late:
                return
            else:
                time.sleep(self._storage.poll_s / 4)
