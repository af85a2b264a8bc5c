"""Messages as frozen types with their JSON: commands and reports on the socket, notes in a mailbox, failures.

A trainer and its writer exchange commands and reports over a socket, one JSON object a line. Both run the same
version. The writers of a save exchange notes: small files in a mailbox. Other processes and other versions read
the notes, so their format is fixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.checkpoint.commit import BlockReport, Commit
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import HoldfastError, error_from_record, error_record
from holdfast.core.events import Event
from holdfast.format import strictjson
from holdfast.plan.writer_job import WriterJob

Values = Mapping[str, Any]  # a rank's values other than tensors, as `value_fields` returns them


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way to another process: the name of its class, and its message."""

    kind: str
    message: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        return Failure(*error_record(error))

    def error(self) -> HoldfastError:
        return error_from_record([self.kind, self.message])


def _failure(record: Any) -> Failure | None:
    """Decode an error record; None if the value is not one."""
    if isinstance(record, list) and len(record) == 2 and all(isinstance(text, str) for text in record):
        return Failure(*record)
    return None


# Notes: writer to writer, and to everyone who looks at a root.


@dataclass(frozen=True, slots=True)
class SaveStarted:
    """The note `begun`: the files of the attempt exist. A note may lack any of the fields."""

    step: int | None
    world: int | None
    total_bytes: int | None

    def note(self) -> bytes:
        return strictjson.dumps({"step": self.step, "world": self.world, "bytes": self.total_bytes})

    @staticmethod
    def decode(value: Any) -> SaveStarted | None:
        """Decode the note; None if it is empty or invalid."""
        if not isinstance(value, dict) or not value:
            return None
        step, world, size = (value.get(name) for name in ("step", "world", "bytes"))
        return SaveStarted(step, world, size) if all(map(_is_count, (step, world, size))) else None


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """The note `status-R`: writer R is alive. `beat` changes with every heartbeat."""

    beat: int = 0
    phase: str = "beginning"
    written: int = 0
    total: int = 0

    def note(self) -> bytes:
        return strictjson.dumps({"beat": self.beat, "phase": self.phase, "written": self.written, "total": self.total})

    @staticmethod
    def decode(value: Any) -> WriterStatus:
        """Decode the note; an invalid one is the status of a writer that has done nothing yet."""
        if not isinstance(value, dict):
            return WriterStatus()
        beat, written, total = (value.get(name) for name in ("beat", "written", "total"))
        if not all(map(_is_count, (beat, written, total))):
            return WriterStatus()
        return WriterStatus(beat or 0, str(value.get("phase", "beginning")), written or 0, total or 0)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**63)


@dataclass(frozen=True, slots=True)
class RankReport:
    """The note `report-R`: the blocks that rank R wrote and the rank's values, or its failure."""

    plan: str
    blocks: tuple[BlockReport, ...] = ()
    values: Values | None = None
    failure: Failure | None = None

    def note(self) -> bytes:
        if self.failure is not None:
            return strictjson.dumps({"plan": self.plan, "error": [self.failure.kind, self.failure.message]})
        blocks = [block.fields() for block in self.blocks]
        return strictjson.dumps({"plan": self.plan, "blocks": blocks, "values": dict(self.values or {})})

    @staticmethod
    def decode(value: Any) -> RankReport | None:
        """Decode the note; None if it is invalid."""
        if not isinstance(value, dict) or not isinstance(value.get("plan"), str):
            return None
        if value.get("error"):
            failure = _failure(value["error"])
            return None if failure is None else RankReport(value["plan"], failure=failure)
        if not isinstance(value.get("blocks"), list) or not isinstance(value.get("values"), dict):
            return None
        try:
            blocks = tuple(map(BlockReport.from_fields, value["blocks"]))
        except (TypeError, ValueError):
            return None
        return RankReport(value["plan"], blocks, value["values"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The note `outcome`: why the save failed, or None if the checkpoint was published."""

    failure: Failure | None = None

    def fields(self) -> dict[str, Any]:
        return {"error": None if self.failure is None else [self.failure.kind, self.failure.message]}

    def note(self) -> bytes:
        return strictjson.dumps(self.fields())

    @staticmethod
    def decode(value: Any) -> Outcome | None:
        """Decode the note; None if it is invalid."""
        if not isinstance(value, dict) or "error" not in value:
            return None
        if value["error"] is None:
            return Outcome()
        failure = _failure(value["error"])
        return None if failure is None else Outcome(failure)


# Commands: trainer to writer.


@dataclass(frozen=True, slots=True)
class AssignJob:
    """The job of the saves that follow. `arenas` has the arena of every rank of this host.

    `reports` and `arena_digest` come from the card of a state that an earlier process captured: the bytes in
    memory must still match them.
    """

    storage: str
    job: WriterJob
    commit: Commit | None  # on rank 0
    arenas: Mapping[int, str]
    threads: int
    root: str
    reports: tuple[BlockReport, ...] = ()
    arena_digest: str = ""


@dataclass(frozen=True, slots=True)
class AddArena:
    """An arena that the writer deletes when it exits, used or not."""

    path: str


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """One save: the attempt, the folder that it becomes, its lineage, and the plan that it was captured by.

    `keep` is the retention policy to apply after publication, in JSON form.
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


@dataclass(frozen=True, slots=True)
class CaptureDone:
    """The arena holds the whole state of an attempt. `values` may be JSON text already.

    `stall_ms` is the time that training waited for the call.
    """

    attempt: str
    values: Values | bytes
    stall_ms: float | None = None


@dataclass(frozen=True, slots=True)
class AbandonSave:
    """The state of an attempt cannot be captured."""

    attempt: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class CloseWriter:
    """The writer exits once its work is done."""


Command = AssignJob | AddArena | SaveOrder | CaptureDone | AbandonSave | CloseWriter


def encode_command(command: Command) -> bytes:
    """Return the JSON line of a command, without the newline."""
    if isinstance(command, CaptureDone):
        values = command.values
        text = values if isinstance(values, bytes) else json.dumps(dict(values)).encode()
        attempt, stall_ms = json.dumps(command.attempt).encode(), json.dumps(command.stall_ms).encode()
        return b'{"do":"captured","attempt":%b,"stall_ms":%b,"values":%b}' % (attempt, stall_ms, text)
    return json.dumps(_command_fields(command)).encode()


def _command_fields(command: AssignJob | AddArena | SaveOrder | AbandonSave | CloseWriter) -> dict[str, Any]:
    match command:
        case AssignJob():
            return {"do": "plan", "fields": _assignment_fields(command)}
        case AddArena(path):
            return {"do": "arena", "path": path}
        case SaveOrder():
            return {"do": "order", "order": asdict(command)}
        case AbandonSave(attempt, failure):
            return {"do": "abandon", "attempt": attempt, "error": [failure.kind, failure.message]}
        case CloseWriter():
            return {"do": "close"}


def _assignment_fields(message: AssignJob) -> dict[str, Any]:
    return {
        "storage": message.storage,
        "job": message.job.fields(),
        "commit": None if message.commit is None else message.commit.fields(),
        "arenas": {str(rank): path for rank, path in message.arenas.items()},
        "threads": message.threads,
        "root": message.root,
        "reports": [report.fields() for report in message.reports],
        "arena_digest": message.arena_digest,
    }


def decode_command(line: bytes | bytearray) -> Command:
    """Decode a line that `encode_command` made; raises ValueError for an unknown command."""
    fields = json.loads(line)
    match fields["do"]:
        case "plan":
            return _assignment(fields["fields"])
        case "arena":
            return AddArena(fields["path"])
        case "order":
            order = fields["order"]
            return SaveOrder(**{**order, "lineage": Lineage.from_fields(order["lineage"])})
        case "captured":
            return CaptureDone(fields["attempt"], fields["values"], fields["stall_ms"])
        case "abandon":
            return AbandonSave(fields["attempt"], Failure(*fields["error"]))
        case "close":
            return CloseWriter()
    raise ValueError(f"unknown command {fields['do']!r}")


def _assignment(fields: Mapping[str, Any]) -> AssignJob:
    return AssignJob(
        storage=fields["storage"],
        job=WriterJob.from_fields(fields["job"]),
        commit=None if fields["commit"] is None else Commit.from_fields(fields["commit"]),
        arenas={int(rank): path for rank, path in fields["arenas"].items()},
        threads=fields["threads"],
        root=fields["root"],
        reports=tuple(map(BlockReport.from_fields, fields["reports"])),
        arena_digest=fields["arena_digest"],
    )


# Reports: writer to trainer.


@dataclass(frozen=True, slots=True)
class WriterEvent:
    """An event of the writer, for the listeners of the run."""

    event: Event


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """The outcome of an attempt. With `kept`, the captured state stays in memory for the next start.

    `events` report what retention did after the publication: listeners hear of them in this order.
    """

    attempt: str
    outcome: Outcome
    kept: bool
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class WriterGone:
    """The writer process ended. The trainer's end of the socket makes this report; it is never sent."""

    why: str


Report = WriterEvent | SaveEnded | WriterGone


def encode_report(report: WriterEvent | SaveEnded) -> bytes:
    """Return the JSON line of a report, without the newline."""
    match report:
        case WriterEvent(event):
            fields: dict[str, Any] = {"tell": "event", "event": event.fields()}
        case SaveEnded(attempt, outcome, kept, events):
            fields = {"tell": "outcome", "attempt": attempt, "outcome": outcome.fields(), "kept": kept}
            fields["events"] = [event.fields() for event in events]
    return json.dumps(fields).encode()


def decode_report(line: bytes) -> Report:
    """Decode a line that `encode_report` made; raises ValueError for any other."""
    fields = json.loads(line)
    if fields["tell"] == "event":
        return WriterEvent(Event(**fields["event"]))
    outcome = Outcome.decode(fields["outcome"])
    if fields["tell"] != "outcome" or outcome is None:
        raise ValueError(f"unknown report {fields['tell']!r}")
    events = tuple(Event(**event) for event in fields["events"])
    return SaveEnded(fields["attempt"], outcome, fields["kept"], events)
