"""Waiting for the writers of other ranks, heartbeats, and the notes that stand in for a dead writer."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.lineage import Lineage
from holdfast.cli import gc
from holdfast.core.errors import PeerFailed, StorageError
from holdfast.core.ranks import host_identity
from holdfast.storage.local import LocalStorage
from holdfast.writer import mailbox as mail
from holdfast.writer import mailbox as module
from holdfast.writer.client import DeadWriterProxy
from holdfast.writer.in_flight import InFlight, saves_in_flight
from holdfast.writer.mailbox import Heartbeat, Mailbox, Watch, heartbeat
from holdfast.writer.messages import Failure, Outcome, RankReport, SaveOrder, SaveStarted, WriterStatus
from holdfast.writer.startup_cleanup import dead_attempts, wait_for_writers
from tests.cli.calls import call
from tests.writer.conftest import wait_until
from tests.writer.two_hosts import ATTEMPT, FOLDER, PLAN


@pytest.mark.parametrize(("waited_s", "expected_s"), [(0.0, 4.0), (1.0, 3.0), (3.9, 2.0), (60.0, 2.0)])
def test_the_deadline_counts_from_the_beginning_of_the_save(
    mailbox: Mailbox, waited_s: float, expected_s: float
) -> None:
    before = time.monotonic()
    watch = Watch(mailbox, 4.0, 60.0, time.monotonic() - waited_s)
    after = time.monotonic()  # the watch began at some moment between the two, however far apart they are
    assert watch._end - after - 0.01 <= expected_s <= watch._end - before + 0.01


def test_who_comes_late_still_hears_what_is_there(mailbox: Mailbox) -> None:
    mailbox.post_outcome(Outcome())
    watch = Watch(mailbox, 0.1, 60.0, time.monotonic() - 60)
    watch.wait(lambda names: mail.OUTCOME in names, lambda names: [0], "the outcome")
    with pytest.raises(PeerFailed, match="not there after"):
        watch.wait(lambda names: False, lambda names: [0], "what never comes")


UNREADABLE = {
    "empty": b"",
    "zeros": bytes(40),
    "torn": b'{"step":1,"wor',
    "not text": b"\xff\xfe\x00",
    "a number": b"17",
    "a list": b"[1, 2]",
    "nothing": b"null",
    "nested": b"[" * 5000,
}
NOTES = (mail.HOST, mail.BEGUN, mail.OUTCOME, mail.status(0), mail.report(0), mail.gave(0), mail.seen(0))


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_note_that_cannot_be_read_is_a_note_that_is_not_there(mailbox: Mailbox, tmp_path: Path, data: bytes) -> None:
    storage = LocalStorage(tmp_path)
    for name in NOTES:
        (tmp_path / mailbox.folder / name).write_bytes(data)
    assert mailbox.host() is None and mailbox.outcome() is None and mailbox.report_of(0) is None
    assert mailbox.begun() is None
    assert saves_in_flight(storage) == []
    assert dead_attempts(storage, 0.01) == {mailbox.folder}
    assert wait_for_writers(storage, "run", 5.0, 0.01, look_at_storage=True) == {mailbox.folder}


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"plan": 1},
        {"plan": "p"},
        {"plan": "p", "blocks": [], "values": 3},
        {"plan": "p", "blocks": [["file", 0]], "values": {}},
        {"plan": "p", "error": ["only one"]},
    ],
)
def test_a_report_of_another_shape_is_not_there(mailbox: Mailbox, report: dict[str, object]) -> None:
    mailbox._post(mail.report(3), json.dumps(report).encode())
    assert mailbox.report_of(3) is None
    mailbox._post(mail.report(3), b'{"plan":"p","blocks":[],"values":{}}')
    assert mailbox.report_of(3) == RankReport("p", (), {})


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b'"half'], ids=["empty", "zeros", "torn"])
def test_a_run_goes_on_after_notes_were_lost_in_a_power_loss(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `holdfast` does under a root with such a mailbox: restore, save, gc, ls, top, verify, convert."""
    monkeypatch.setattr(gc, "_SILENCE_S", 0.1)
    root = tmp_path / "run"
    holdfast.save(root / "step-000000000001", {"w": torch.ones(3)}, step=1)
    boxes = [Mailbox(LocalStorage(root), f".attempt-{digit * 16}") for digit in "ab"]
    for box in boxes:
        box.make()
        for name in NOTES:
            (root / box.folder / name).write_bytes(data)
        (root / mail.attempt_of(box.folder)).mkdir()
    for command in (["ls", root], ["top", root], ["gc", root, "--dry-run"], ["verify", root / "step-000000000001"]):
        assert call(*command).exit_code == 0, command
    assert call("convert", root / "step-000000000001", tmp_path / "converted").exit_code == 0
    assert call("gc", root).exit_code == 0
    assert not list(root.glob(".mail-*")) and not list(root.glob(".attempt-*"))
    boxes[0].make()
    (root / boxes[0].folder / mail.HOST).write_bytes(data)
    live = {"w": torch.zeros(3)}
    with holdfast.Checkpointer(root, silence_s=0.1) as checkpointer:
        assert checkpointer.restore(live) == 1 and live["w"].tolist() == [1.0] * 3
        checkpointer.save(2, live).result(60)
    assert not list(root.glob(".mail-*"))


ORDER = SaveOrder(ATTEMPT, FOLDER, Lineage(3), 20.0, 20.0, PLAN)
FULL = Failure("StorageError", "the disk is full")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    monkeypatch.setattr(module, "_FIRST_BEAT_S", 0.01)
    monkeypatch.setattr(module, "_STATUS_POLL_S", 0.001)


def test_a_writer_that_falls_silent_ends_the_wait(mailbox: Mailbox) -> None:
    mailbox.post_status(1, WriterStatus(1))
    with pytest.raises(PeerFailed, match="waiting for the bytes: the writer of rank 1 is silent for 0 s"):
        Watch(mailbox, 2.0, 0.05).wait(lambda names: False, lambda names: [1], "the bytes")


def test_a_writer_is_not_silent_before_its_time(mailbox: Mailbox) -> None:
    mailbox.post_status(1, WriterStatus(1))
    with pytest.raises(PeerFailed, match="not there after 0 s"):
        Watch(mailbox, 0.1, 60.0).wait(lambda names: False, lambda names: [1], "the bytes")


def test_a_writer_whose_status_changes_is_not_silent(mailbox: Mailbox) -> None:
    beats: list[int] = []

    def is_last_beat(names: set[str]) -> bool:
        beats.append(len(beats))
        mailbox.post_status(1, WriterStatus(len(beats)))
        return len(beats) == 10

    Watch(mailbox, 20.0, 0.0).wait(is_last_beat, lambda names: [1], "the bytes")
    assert len(beats) == 10, "no silence is allowed, and there was none"


def test_a_heartbeat_posts_a_status_that_changes(mailbox: Mailbox) -> None:
    with Heartbeat(mailbox, 1, 296) as beat:
        beat.phase, beat.written = "writing", 128
        wait_until(lambda: WriterStatus.decode(mailbox.read("status-1")).beat > 2)
    status = WriterStatus.decode(mailbox.read("status-1"))
    assert (status.phase, status.written, status.total) == ("writing", 128, 296) and not beat.stopped


def test_a_heartbeat_does_not_keep_its_process_from_its_end(mailbox: Mailbox) -> None:
    before = set(threading.enumerate())
    with Heartbeat(mailbox, 1, 296):
        assert [thread.daemon for thread in set(threading.enumerate()) - before] == [True]


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
