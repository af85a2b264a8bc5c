"""Heartbeats, what `in_flight` reads from them, and the notes that stand in for a dead writer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import StorageError
from holdfast.core.host import host_identity
from holdfast.storage.local import LocalStorage
from holdfast.writer import heartbeat as module
from holdfast.writer.dead_writer import DeadWriterProxy
from holdfast.writer.heartbeat import Heartbeat, heartbeat
from holdfast.writer.in_flight import InFlight, saves_in_flight
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import Failure, Outcome, RankReport, SaveOrder, SaveStarted, WriterStatus
from tests.writer.two_hosts import ATTEMPT, FOLDER, PLAN

ORDER = SaveOrder(ATTEMPT, FOLDER, Lineage(3), 20.0, 20.0, PLAN)
FULL = Failure("StorageError", "the disk is full")


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    monkeypatch.setattr(module, "_FIRST_BEAT_S", 0.01)


def test_a_heartbeat_posts_a_status_that_changes(mailbox: Mailbox) -> None:
    with Heartbeat(mailbox, 1, 296) as beat:
        beat.phase, beat.written = "writing", 128
        wait_until(lambda: WriterStatus.decode(mailbox.read("status-1")).beat > 2)
    status = WriterStatus.decode(mailbox.read("status-1"))
    assert (status.phase, status.written, status.total) == ("writing", 128, 296) and not beat.stopped


def test_a_heartbeat_notices_an_outcome(mailbox: Mailbox) -> None:
    with Heartbeat(mailbox, 1, 296) as beat:
        mailbox.post_outcome(Outcome(FULL))
        wait_until(lambda: beat.stopped)


def test_a_heartbeat_survives_a_mailbox_that_does_not_exist(tmp_path: Path) -> None:
    mailbox = Mailbox(LocalStorage(tmp_path), ATTEMPT)
    with Heartbeat(mailbox, 0, 1):
        time.sleep(0.05)
        mailbox.make()
        wait_until(lambda: "status-0" in mailbox.names())


def test_an_attempt_without_a_writer_process_is_announced_while_it_lasts(tmp_path: Path) -> None:
    storage, mailbox = LocalStorage(tmp_path), Mailbox(LocalStorage(tmp_path), ATTEMPT)
    with heartbeat(storage, ATTEMPT, SaveStarted(3, 2, 296)):
        assert mailbox.host() == host_identity() and mailbox.begun() == SaveStarted(3, 2, 296)
        assert storage.is_held(mailbox.folder)
        wait_until(lambda: "status-0" in mailbox.names())
        assert saves_in_flight(storage) == [InFlight(ATTEMPT, 3, 2, 0, 296, 0, "writing")]
    assert mailbox.names() == set() and saves_in_flight(storage) == []


def test_a_save_in_flight_is_summed_over_its_writers(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_begun(SaveStarted(3, 2, 296))
    mailbox.post_status(0, WriterStatus(4, "waiting for the others", 100, 100))
    mailbox.post_status(1, WriterStatus(4, "writing", 28, 196))
    mailbox.post_report(0, RankReport(PLAN, (), {}))
    assert saves_in_flight(LocalStorage(tmp_path)) == [InFlight(ATTEMPT, 3, 2, 128, 296, 1, "writing")]
    mailbox.post_outcome(Outcome())
    assert saves_in_flight(LocalStorage(tmp_path)) == []


def test_rank_0_posts_the_outcome_of_its_dead_writer(tmp_path: Path) -> None:
    storage, mailbox = LocalStorage(tmp_path), Mailbox(LocalStorage(tmp_path), ATTEMPT)
    storage.begin(ATTEMPT)
    proxy = DeadWriterProxy(storage, 0, 2)
    proxy.report(ORDER, StorageError("the disk is full"))
    wait_until(lambda: mailbox.outcome() == Outcome(FULL))
    assert not (tmp_path / ATTEMPT).exists()
    proxy.sweep(wait_s=0.05)
    assert mailbox.names() == set()


def test_another_rank_reports_the_failure_of_its_dead_writer(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    DeadWriterProxy(LocalStorage(tmp_path), 1, 2).report(ORDER, StorageError("the disk is full"))
    wait_until(lambda: mailbox.report_of(1) == RankReport("", failure=FULL))
