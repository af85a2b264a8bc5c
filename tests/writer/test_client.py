"""The trainer's end of a writer process: commands, reports and the end; and the notes in place of a dead writer."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import StorageError
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.testing.watched import Gate, WatchedSharedStorage
from holdfast.writer.client import DeadWriterProxy, WriterClient, WriterProgram, writers_running
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import (
    AbandonSave,
    AddArena,
    AssignJob,
    CaptureDone,
    CloseWriter,
    Command,
    Failure,
    Outcome,
    RankReport,
    Report,
    SaveOrder,
    WriterGone,
    encode_command,
)
from tests.writer import two_hosts
from tests.writer.conftest import wait_until
from tests.writer.gates import Count, HoldUp
from tests.writer.two_hosts import ATTEMPT, FOLDER, PLAN

ORDER = SaveOrder(ATTEMPT, FOLDER, Lineage(3), 20.0, 20.0, PLAN)
FULL = Failure("StorageError", "the disk is full")
POLL_S = LocalStorage.poll_s

# Writers that import no package, so that they start at once.
RECORD = """
import pathlib, socket
def main(line, path):
    with socket.socket(fileno=line) as connection, connection.makefile("rb") as lines:
        with pathlib.Path(path).open("wb") as record:
            for command in lines:
                record.write(command)
                if b'"close"' in command:
                    break
"""
STUCK = "import time\ndef main(line):\n    time.sleep(60)\n"
BROKEN = "import sys\ndef main(line):\n    print('a first line', file=sys.stderr)\n    sys.exit('the arena is gone')\n"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WriterClient]]:
    """Start a writer process that runs this source."""
    clients: list[WriterClient] = []

    def start_writer(
        source: str, *arguments: str, on_report: Callable[[WriterClient, Report], None] = lambda client, report: None
    ) -> WriterClient:
        (tmp_path / "other_writer.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with writers_running(WriterProgram("other_writer", arguments)):
            clients.append(WriterClient(on_report))
        return clients[-1]

    yield start_writer
    for client in clients:
        client.kill()
        client.close(20)


def test_the_process_receives_every_command_as_it_was_sent(tmp_path: Path, start: Callable[..., WriterClient]) -> None:
    client = start(RECORD, str(tmp_path / "record"))
    job = AssignJob("root", two_hosts.job(0), two_hosts.commit(), {0: "arena-0"}, 2, "a" * 32)
    client.assign(job)
    client.add_arena("arena-1")
    client.order(ORDER)
    client.captured(ATTEMPT, {"note": 1})
    client.abandon(ATTEMPT, StorageError("the disk is full"))
    assert client.close(20)
    captured, abandoned = CaptureDone(ATTEMPT, {"note": 1}), AbandonSave(ATTEMPT, FULL)
    sent: list[Command] = [job, AddArena("arena-1"), ORDER, captured, abandoned, CloseWriter()]
    assert (tmp_path / "record").read_bytes().splitlines() == [encode_command(command) for command in sent]


def test_the_last_report_says_how_the_process_ended(start: Callable[..., WriterClient]) -> None:
    reports: list[tuple[WriterClient, Report]] = []
    client = start(BROKEN, on_report=lambda *report: reports.append(report))
    assert client.close(20)
    assert reports == [(client, WriterGone("exit code 1: the arena is gone"))]


def test_a_writer_is_alive_until_it_is_killed(start: Callable[..., WriterClient]) -> None:
    client = start(STUCK)
    assert client.alive()
    client.kill()
    assert not client.alive()


def test_a_writer_that_takes_too_long_is_not_closed(start: Callable[..., WriterClient]) -> None:
    client = start(STUCK)
    assert client.close(0.05) is False and client.alive()
    client.kill()
    assert client.close(20) is True


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_writer_to_its_trainer(start: Callable[..., WriterClient]) -> None:
    client = start(STUCK)
    child = os.fork()
    if child == 0:
        is_ours = True
        try:
            is_ours = client.alive() or client.close(0.0) is not True
        finally:
            os._exit(is_ours)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.alive()


def test_a_writer_that_cannot_start_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = str(tmp_path / "no-python")
    monkeypatch.setattr(sys, "executable", nowhere)
    with holdfast.Checkpointer(tmp_path / "root") as checkpointer:
        with pytest.warns(UserWarning, match=r"step 1 was not saved: the writer process cannot start .*no-python"):
            handle = checkpointer.save(1, {"w": torch.zeros(3)})
        with pytest.raises(holdfast.HoldfastError, match=r"the writer process cannot start .*no-python"):
            handle.result(60)
    monkeypatch.undo()
    with holdfast.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)


def dead_writer(storage: SharedStorage, rank: int, gate: Gate) -> DeadWriterProxy:
    """Report that a writer of two died, through a gate."""
    proxy = DeadWriterProxy(WatchedSharedStorage(storage, gate), rank, 2)
    proxy.report(ORDER, StorageError("the disk is full"))
    return proxy


def test_a_storage_that_hangs_does_not_keep_the_trainer_from_its_end(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    gate, before = HoldUp(), set(threading.enumerate())
    dead_writer(LocalStorage(tmp_path), 1, gate)
    started = set(threading.enumerate()) - before
    gate.opened.set()
    wait_until(lambda: mailbox.report_of(1) is not None)
    assert [thread.daemon for thread in started] == [True]


def test_a_report_waits_for_the_mailbox_without_haste(tmp_path: Path) -> None:
    mailbox, gate, began = Mailbox(LocalStorage(tmp_path), ATTEMPT), Count(), time.monotonic()
    dead_writer(LocalStorage(tmp_path), 1, gate)
    time.sleep(4 * POLL_S)
    mailbox.make()
    mailbox.post_host("north")
    wait_until(lambda: mailbox.report_of(1) == RankReport("", failure=FULL))
    assert gate.calls["files"] <= (time.monotonic() - began) / POLL_S + 1


def test_rank_0_keeps_the_outcome_until_the_others_have_read_it(tmp_path: Path) -> None:
    mailbox = Mailbox(LocalStorage(tmp_path), ATTEMPT)
    proxy = dead_writer(LocalStorage(tmp_path), 0, Gate())
    wait_until(lambda: mailbox.outcome() is not None)
    read: list[Outcome | None] = []

    def read_outcome() -> None:
        read.append(mailbox.outcome())
        mailbox.post_seen(1)

    reader = threading.Timer(0.1, read_outcome)
    reader.start()
    proxy.sweep(wait_s=20)
    assert read == [Outcome(FULL)] and mailbox.names() == set()
    reader.join()


def test_an_outcome_that_nobody_reads_is_awaited_without_haste(tmp_path: Path) -> None:
    mailbox, gate = Mailbox(LocalStorage(tmp_path), ATTEMPT), Count()
    proxy = dead_writer(LocalStorage(tmp_path), 0, gate)
    wait_until(lambda: mailbox.outcome() is not None)
    gate.calls.clear()
    began = time.monotonic()
    proxy.sweep(wait_s=4 * POLL_S)
    assert mailbox.names() == set()
    assert gate.calls["files"] <= (time.monotonic() - began) / (POLL_S / 2) + 1
