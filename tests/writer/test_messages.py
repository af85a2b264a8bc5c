"""Messages: every kind survives its JSON, and the notes and cards have the bytes of the releases before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import PeerFailed, StorageError
from holdfast.core.events import Event
from holdfast.format import strictjson
from holdfast.writer.arena_card import Card
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
    SaveEnded,
    SaveOrder,
    SaveStarted,
    WriterEvent,
    WriterStatus,
    decode_command,
    decode_report,
    encode_command,
    encode_report,
)
from tests.writer import two_hosts
from tests.writer.two_hosts import ATTEMPT, FOLDER, PLAN

# Written by the code before the messages were types: all notes and cards of a save of `two_hosts`, one published,
# and one that failed because rank 1 could not capture its state.
GOLDEN = json.loads((Path(__file__).parent / "golden" / "notes_and_cards.json").read_text())
LINEAGE = Lineage(3, 1, {"loss": 0.5}, ((2, ".attempt-b"),), ())
FILE = "model-00001-of-00001.safetensors"
BLOCKS = (
    BlockReport(FILE, 0, 128, "95f59c93141053bf3d5d4dda6b7d24d4"),
    BlockReport(FILE, 128, 128, "d6b8d79b528bfdfbb89d46e8c8df3069"),
    BlockReport(FILE, 256, 40, "435d40d988f1b556401d5c2c0eea1a99"),
)
VALUES = {"note": ["tree", "0" * 32, 0, ["json", {"a": 1}]]}
OTHER_VALUES = {"note": ["tree", "0" * 32, 0, None]}
FULL = Failure("StorageError", "the disk is full")
NOTES: dict[str, dict[str, Any]] = {
    "published": {
        "begun": SaveStarted(3, 2, 296),
        "outcome": Outcome(),
        "report-0": RankReport(PLAN, BLOCKS, VALUES),
        "report-1": RankReport(PLAN, (), OTHER_VALUES),
        "status-0": WriterStatus(1, "waiting for the capture", 0, 296),
        "status-1": WriterStatus(1, "waiting for the capture", 0, 0),
    },
    "failed": {
        "begun": SaveStarted(3, 2, 296),
        "outcome": Outcome(FULL),
        "report-0": RankReport(PLAN, failure=FULL),
        "report-1": RankReport(PLAN, failure=FULL),
    },
}


def golden_notes() -> Iterator[Any]:
    for case, notes in NOTES.items():
        for name, note in notes.items():
            yield pytest.param(GOLDEN[case]["notes"][name], note, id=f"{case}-{name}")


@pytest.mark.parametrize(("text", "note"), list(golden_notes()))
def test_a_note_has_the_bytes_of_the_releases_before(text: str, note: Any) -> None:
    assert note.note().decode() == text
    assert type(note).decode(json.loads(text)) == note


def card(rank: int, case: str) -> Card:
    values, reports = (VALUES, BLOCKS) if rank == 0 else (OTHER_VALUES, ())
    commit = two_hosts.commit() if rank == 0 else None
    digest = "a52ffa8510878c7da565e1891f6e9954" if case == "failed" else ""
    reports = () if case == "failed" else reports
    arena, root = f"arena-{rank}", "a" * 32
    return Card(ATTEMPT, LINEAGE, rank, arena, two_hosts.job(rank), commit, reports, values, digest, "north", root)


@pytest.mark.parametrize(("rank", "case"), [(0, "published"), (1, "published"), (0, "failed")])
def test_a_card_has_the_bytes_of_the_releases_before(rank: int, case: str) -> None:
    text = GOLDEN[case]["cards"][f"arena-{rank}.card"]
    assert strictjson.dumps(card(rank, case).fields()).decode() == text
    found = Card.from_fields(json.loads(text))
    assert strictjson.dumps(found.fields()).decode() == text
    assert (found.lineage, found.commit, found.reports) == (LINEAGE, card(rank, case).commit, card(rank, case).reports)


COMMANDS: list[Command] = [
    AssignJob("/root", two_hosts.job(1), None, {1: "arena-1"}, 2, "root"),
    AddArena("arena-0"),
    SaveOrder(ATTEMPT, FOLDER, LINEAGE, 20.0, 10.0, PLAN, [["last", 3]]),
    CaptureDone(ATTEMPT, VALUES),
    AbandonSave(ATTEMPT, Failure.of(StorageError("the disk is full"))),
    CloseWriter(),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_survives_its_line(command: Command) -> None:
    line = encode_command(command)
    assert b"\n" not in line
    assert encode_command(decode_command(line)) == line
    if not isinstance(command, AssignJob):  # copies of bytes lose their dtype, which no writer needs
        assert decode_command(line) == command


def test_a_job_keeps_its_commit_and_the_digests_of_a_card() -> None:
    sent = AssignJob("/root", two_hosts.job(0), two_hosts.commit(), {0: "arena-0"}, 2, "root", BLOCKS, "digest")
    found = decode_command(encode_command(sent))
    assert isinstance(found, AssignJob)
    assert (found.commit, found.reports, found.arena_digest) == (sent.commit, BLOCKS, "digest")
    assert found.job.fields() == sent.job.fields() and found.arenas == {0: "arena-0"}


def test_values_that_are_text_already_are_sent_as_they_are() -> None:
    text = json.dumps(VALUES).encode()
    assert decode_command(encode_command(CaptureDone(ATTEMPT, text))) == CaptureDone(ATTEMPT, VALUES)


@pytest.mark.parametrize(
    "report",
    [
        WriterEvent(Event("written", 3, 1, 296, 0.5, at=1.0)),
        SaveEnded(ATTEMPT, Outcome(), kept=False),
        SaveEnded(ATTEMPT, Outcome(FULL), kept=True),
        SaveEnded(ATTEMPT, Outcome(), kept=False, events=(Event("removed", 3, detail="no policy keeps it"),)),
    ],
)
def test_a_report_survives_its_line(report: WriterEvent | SaveEnded) -> None:
    line = encode_report(report)
    assert b"\n" not in line and decode_report(line) == report


@pytest.mark.parametrize(
    "line", [b'{"tell": "else", "outcome": {"error": null}}', b'{"tell": "outcome", "outcome": {}}']
)
def test_a_line_of_another_shape_is_no_report(line: bytes) -> None:
    with pytest.raises(ValueError, match="unknown report"):
        decode_report(line)
    with pytest.raises(ValueError, match="unknown command"):
        decode_command(b'{"do": "else"}')


def test_a_failure_keeps_its_class_and_message() -> None:
    assert isinstance(FULL.error(), StorageError) and str(FULL.error()) == "the disk is full"
    assert Failure.of(OSError("no space")) == Failure("PeerFailed", "OSError: no space")
    assert isinstance(Failure("Unknown", "x").error(), PeerFailed)


@pytest.mark.parametrize("value", [None, [], {}, 3, {"step": -1}, {"world": "2"}, {"bytes": 2**63}, {"step": True}])
def test_an_invalid_begun_note_counts_as_absent(value: object) -> None:
    assert SaveStarted.decode(value) is None


@pytest.mark.parametrize("value", [None, [], {"written": -1}, {"total": 1.5}, {"beat": "1"}])
def test_an_invalid_status_is_that_of_a_writer_that_begins(value: object) -> None:
    assert WriterStatus.decode(value) == WriterStatus()
