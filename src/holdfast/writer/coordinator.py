"""The coordinator: rank 0's writer begins an attempt, hears all reports, commits and publishes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import retention
from holdfast.checkpoint.commit import BlockReport, Commit
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.publish import begin, publish
from holdfast.checkpoint.retention_index import RetentionIndex
from holdfast.core.errors import HoldfastError, LayoutError, StorageError, error_from_record, error_record
from holdfast.core.events import Event
from holdfast.core.host import host_identity
from holdfast.keep import Policy
from holdfast.storage.base import Hold, SharedStorage, Tracked
from holdfast.writer import mailbox as mail
from holdfast.writer.mailbox import Mailbox, Watch


@dataclass(frozen=True, slots=True)
class Order:
    """One save: the attempt, the folder it becomes, its lineage, and the plan it was captured by.

    `keep` is the policy of retention, as its fields, that is applied once it is published.
    """

    attempt: str
    folder: str
    lineage: Lineage
    deadline_s: float
    silence_s: float
    plan: str
    keep: Sequence[Any] | None = None

    @property
    def step(self) -> int:
        assert self.lineage.step is not None
        return self.lineage.step

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Order:
        return Order(**{**fields, "lineage": Lineage.from_fields(fields["lineage"])})


class Coordinator:
    """Commits the saves of one plan; keeps a mailbox until all ranks know the outcome."""

    def __init__(self, storage: SharedStorage, commit: Commit, plan: str) -> None:
        self._storage = storage
        self._commit = commit
        self._plan = plan
        self._started = 0.0
        self._hold: Hold | None = None
        self._old: Mailbox | None = None
        self._sweeper: threading.Thread | None = None
        self._retention = RetentionIndex(storage)
        self.news: list[Event] = []  # of retention, for the trainer

    def begin(self, order: Order) -> None:
        """Make the mailbox, the attempt's folder and its files."""
        self._started = time.monotonic()
        if self._old is not None:
            self._old.discard()  # a new save begins when every rank has heard of the last one
            self._old = None
        mailbox = Mailbox(self._storage, order.attempt)
        mailbox.make()
        self._hold = self._storage.hold(mailbox.folder)
        mailbox.post(mail.HOST, host_identity())
        files = [(file.name, file.size) for file in self._commit.files]
        begin(self._storage, order.attempt, order.folder, files)
        size = sum(size for _, size in files)
        mailbox.post(mail.BEGUN, {"step": order.step, "world": self._commit.world, "bytes": size})

    def finish(self, order: Order) -> None:
        """Wait for every rank's report, commit and publish."""
        reports = self._reports(order)
        plans = {report["plan"] for report in reports}
        if plans != {self._plan}:
            raise LayoutError(f"the ranks wrote by {len(plans)} different plans: nothing is published")
        blocks = [BlockReport(*block) for report in reports for block in report["blocks"]]
        values = [report["values"] for report in reports]
        seconds = round(time.monotonic() - self._started, 3)
        manifest, small = self._commit.manifest(order.attempt, order.lineage, blocks, values, seconds)
        for name in self._storage.files(order.attempt) if self._commit.hosts > 1 else ():
            if name.startswith("travel-"):
                self._storage.drop(order.attempt, name)
        publish(self._storage, order.attempt, order.folder, manifest, small)
        keep = None if order.keep is None else Policy.from_fields(order.keep)
        self.news += retention.apply(self._storage, keep, order.step, self._retention).events(order.step)

    def _reports(self, order: Order) -> list[dict[str, Any]]:
        mailbox = Mailbox(self._storage, order.attempt)
        world = self._commit.world
        found: dict[int, dict[str, Any]] = {}

        def take(names: set[str]) -> bool:
            for rank in range(world):
                if rank not in found and mail.report(rank) in names:
                    report = mailbox.report_of(rank)
                    if report is not None and report.get("error"):
                        name, message = report["error"]
                        raise error_from_record([name, message if world == 1 else f"rank {rank}: {message}"])
                    if report is not None:
                        found[rank] = report
            return len(found) == world

        def missing(names: set[str]) -> list[int]:
            return [rank for rank in range(world) if rank not in found]

        watch = Watch(mailbox, order.deadline_s, order.silence_s, self._started)
        watch.wait(take, missing, "the reports of all writers")
        return [found[rank] for rank in range(world)]

    def conclude(self, order: Order, failure: HoldfastError | None) -> dict[str, Any]:
        """Tell every rank the outcome; of a failed attempt nothing stays but that."""
        outcome = {"error": error_record(failure) if failure else None}
        if failure is not None:
            self._storage.discard(order.attempt)
        self._old = Mailbox(self._storage, order.attempt)
        try:
            self._old.post(mail.OUTCOME, outcome)
        finally:
            if self._hold is not None:
                self._hold.release()
                self._hold = None
        return outcome

    def delete_removed(self) -> None:
        """Delete what retention took away, on a thread: the next save need not wait for that."""
        self.join()
        self._sweeper = threading.Thread(target=self._delete_removed, daemon=True)
        self._sweeper.start()

    def _delete_removed(self) -> None:
        with contextlib.suppress(HoldfastError, OSError):  # the next save, or the next start, tries again
            if isinstance(self._storage, Tracked):
                self._storage.sweep_some()
            else:
                self._storage.sweep()

    def join(self) -> None:
        if self._sweeper is not None:
            self._sweeper.join()

    def sweep(self, wait_s: float = 0.0, *, give_up: bool = False) -> None:
        """Take the last mailbox away once every rank has seen the outcome; then at the latest, to `give_up`."""
        end = time.monotonic() + wait_s
        while self._old is not None:
            try:
                names = self._old.names() if self._commit.world > 1 else set()
            except StorageError:  # the storage is away: the next start finds the mailbox
                self._old = None
                return
            late = time.monotonic() >= end
            if all(mail.seen(rank) in names for rank in range(1, self._commit.world)) or (late and give_up):
                self._old.discard()
                self._old = None
            elif late:
                return
            else:
                time.sleep(self._storage.poll_s / 4)
