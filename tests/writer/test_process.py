"""Two writer processes as threads: a whole save leaves the notes and cards of the releases before."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.checkpoint import shared_memory
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import StorageError
from holdfast.core.ranks import HOST_VARIABLE
from holdfast.storage.local import LocalStorage
from holdfast.writer import arena_card, mailbox
from holdfast.writer.messages import (
    AbandonSave,
    AddArena,
    AssignJob,
    CaptureDone,
    CloseWriter,
    Command,
    Failure,
    Outcome,
    SaveEnded,
    SaveOrder,
    WriterEvent,
    decode_report,
    encode_command,
)
from holdfast.writer.process import TrainerConnection, WriterProcess
from tests.writer import two_hosts
from tests.writer.conftest import wait_until
from tests.writer.test_messages import FULL, GOLDEN, LINEAGE, OTHER_VALUES, VALUES
from tests.writer.two_hosts import ATTEMPT, FOLDER, PLAN


def writer_on_thread(line: socket.socket) -> threading.Thread:
    def run() -> None:
        with line:
            WriterProcess(TrainerConnection(line)).run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


class Trainer:
    """A trainer whose writer runs on a thread."""

    def __init__(self, rank: int, root: Path) -> None:
        two_hosts.fill_arena(Path(f"arena-{rank}"), rank)
        self._line, theirs = socket.socketpair()
        self._lines = self._line.makefile("rb")
        self._writer = writer_on_thread(theirs)
        commit = two_hosts.commit() if rank == 0 else None
        self.send(AssignJob(str(root), two_hosts.job(rank), commit, {rank: f"arena-{rank}"}, 2, "a" * 32))
        self.send(SaveOrder(ATTEMPT, FOLDER, LINEAGE, 20.0, 20.0, PLAN))

    def send(self, command: Command) -> None:
        self._line.sendall(encode_command(command) + b"\n")

    def finish(self) -> tuple[WriterEvent, SaveEnded]:
        event, ended = (decode_report(self._lines.readline()) for _ in range(2))
        assert isinstance(event, WriterEvent) and isinstance(ended, SaveEnded)
        self.send(CloseWriter())
        self._writer.join(20)
        assert not self._writer.is_alive()
        self._lines.close()
        self._line.close()
        return event, ended


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The last text of every note."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HOST_VARIABLE, "north")
    texts: dict[str, str] = {}
    post = LocalStorage.note

    def note(self: LocalStorage, folder: str, name: str, data: bytes) -> None:
        texts[name] = data.decode()
        post(self, folder, name, data)

    monkeypatch.setattr(LocalStorage, "note", note)
    return texts


@pytest.fixture
def cards(notes: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    replace_text = shared_memory.replace_text

    def record(path: str, text: bytes) -> None:
        texts[path] = text.decode()
        replace_text(path, text)

    monkeypatch.setattr(arena_card, "replace_text", record)
    return texts


def without_status(notes: Mapping[str, str]) -> dict[str, str]:
    """All notes but those that depend on the time."""
    return {name: text for name, text in notes.items() if not name.startswith("status-")}


def test_a_published_save(tmp_path: Path, notes: Mapping[str, str], cards: Mapping[str, str]) -> None:
    first, second = (Trainer(rank, tmp_path / "root") for rank in (0, 1))
    first.send(CaptureDone(ATTEMPT, json.dumps(VALUES).encode()))
    second.send(CaptureDone(ATTEMPT, OTHER_VALUES))
    event, ended = first.finish()
    assert (event.event.name, event.event.step, event.event.bytes) == ("written", 3, len(two_hosts.file_bytes()))
    assert ended == second.finish()[1] == SaveEnded(ATTEMPT, Outcome(), kept=False)
    assert without_status(notes) == without_status(GOLDEN["published"]["notes"])
    assert cards == GOLDEN["published"]["cards"]
    assert Checkpoint(LocalStorage(tmp_path / "root"), FOLDER).read("w").tolist() == two_hosts.MATRIX.tolist()
    assert [name for name in os.listdir() if name != "root"] == [], "the arenas and cards are deleted"


def test_a_failed_save(tmp_path: Path, notes: Mapping[str, str], cards: Mapping[str, str]) -> None:
    first, second = (Trainer(rank, tmp_path / "root") for rank in (0, 1))
    second.send(AbandonSave(ATTEMPT, Failure.of(StorageError("the disk is full"))))
    first.send(CaptureDone(ATTEMPT, VALUES))
    assert first.finish()[1] == SaveEnded(ATTEMPT, Outcome(FULL), kept=True)
    assert second.finish()[1] == SaveEnded(ATTEMPT, Outcome(FULL), kept=False)
    assert without_status(notes) == without_status(GOLDEN["failed"]["notes"])
    assert cards == GOLDEN["failed"]["cards"]
    assert sorted(os.listdir()) == ["arena-0", "arena-0.card", "root"], "the captured state stays in memory"


def test_an_arena_that_is_added_before_the_capture_is_deleted_at_the_end(
    tmp_path: Path, notes: Mapping[str, str]
) -> None:
    first, second = (Trainer(rank, tmp_path / "root") for rank in (0, 1))
    Path("arena-of-before").touch()
    first.send(AddArena("arena-of-before"))
    for trainer in (first, second):
        trainer.send(CaptureDone(ATTEMPT, {}))
    for trainer in (first, second):
        trainer.finish()
    assert not Path("arena-of-before").exists()


def test_a_writer_that_has_written_shows_that_it_waits(
    tmp_path: Path, notes: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "_BEAT_S", 0.01)
    first, second = (Trainer(rank, tmp_path / "root") for rank in (0, 1))
    second.send(CaptureDone(ATTEMPT, OTHER_VALUES))
    wait_until(lambda: json.loads(notes.get("status-1", "{}")).get("phase") == "waiting for the others")
    first.send(CaptureDone(ATTEMPT, VALUES))
    assert [trainer.finish()[1].outcome for trainer in (first, second)] == [Outcome()] * 2


def test_a_state_that_its_layout_makes_invalid_is_not_kept(
    tmp_path: Path, notes: Mapping[str, str], cards: Mapping[str, str]
) -> None:
    first, second = (Trainer(rank, tmp_path / "root") for rank in (0, 1))
    for trainer in (first, second):
        trainer.send(CaptureDone(".attempt-of-before", {}))  # not the attempt that is written
    second.send(AbandonSave(ATTEMPT, Failure("LayoutError", "another plan")))
    first.send(CaptureDone(ATTEMPT, VALUES))
    outcome = Outcome(Failure("LayoutError", "another plan"))
    assert [trainer.finish()[1] for trainer in (first, second)] == [SaveEnded(ATTEMPT, outcome, kept=False)] * 2
    assert os.listdir() == ["root"]


def test_a_writer_without_a_trainer_ends_and_deletes_its_arena(tmp_path: Path, notes: Mapping[str, str]) -> None:
    line, theirs = socket.socketpair()
    writer = writer_on_thread(theirs)
    two_hosts.fill_arena(Path("arena-0"), 0)
    job = AssignJob(str(tmp_path / "root"), two_hosts.job(0), two_hosts.commit(), {0: "arena-0"}, 1, "a" * 32)
    with line:
        line.sendall(encode_command(job) + b"\n")
    writer.join(20)
    assert not writer.is_alive() and not Path("arena-0").exists()
    assert notes == {}


def test_a_job_whose_arena_was_replaced_before_the_writer_started_is_passed_over(
    tmp_path: Path, notes: Mapping[str, str]
) -> None:
    line, theirs = socket.socketpair()
    writer = writer_on_thread(theirs)
    two_hosts.fill_arena(Path("arena-0"), 0)
    for arena in ("gone", "arena-0"):
        job = AssignJob(str(tmp_path / "root"), two_hosts.job(0), two_hosts.commit(), {0: arena}, 1, "a" * 32)
        line.sendall(encode_command(job) + b"\n")
    line.sendall(encode_command(CloseWriter()) + b"\n")
    writer.join(20)
    assert not writer.is_alive()
    assert not Path("arena-0").exists(), "the writer took the second job, and deleted its arena at the end"
    line.close()
