"""Running inputs in a child process: time and memory are limited, and whatever it does is known here.

The child notes every input in shared memory before it parses it, so that one that kills it
or never returns is known too. What counts as new is the kind of answer: an input that is
refused for a reason not seen before is kept to be mutated further.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from holdfast.core.errors import HoldfastError
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import Target

MEMORY_BYTES = 200 << 20
INPUT_S = 1.0  # of the processor
SILENCE_S = 60.0
_NOTE_BYTES = 8 << 20
_VARIABLE = re.compile(r"`.*`|'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[0-9a-f]{32}|-?[0-9.]+")


class Hang(BaseException):
    """An input took longer than the limit; no handler of errors may swallow it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that is not refused as it should be, and how."""

    target: str
    kind: str  # "crash", "hang" or "memory"
    what: str
    data: bytes


@dataclass(slots=True)
class Batch:
    """What a child came to."""

    executions: int = 0
    findings: list[Finding] = field(default_factory=list)
    fresh: list[tuple[str, bytes]] = field(default_factory=list)
    grown_bytes: int = 0


def judge(target: Target, data: bytes) -> tuple[str, str]:
    """Parse one input: the kind of finding, "" for none, and what was answered."""
    signal.setitimer(signal.ITIMER_VIRTUAL, INPUT_S)
    try:
        target.parse(data)
    except HoldfastError as error:
        return "", f"{type(error).__name__}: {_VARIABLE.sub('_', str(error)[:300])}"
    except Hang:
        return "hang", f"not done after {INPUT_S} s of the processor"
    except MemoryError:
        return "memory", f"more than {MEMORY_BYTES >> 20} MiB"
    except Exception as error:  # noqa: BLE001  (any other error is a finding)
        return "crash", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "", "read"


def _limit() -> None:
    """Let this process grow by so much and no more, and hear of inputs that take too long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGVTALRM, ring)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def in_child(work: Callable[[mmap.mmap], Batch], targets: Mapping[str, Target]) -> Batch:
    """Do the work in a forked process; one that dies or falls silent is a finding."""
    note = mmap.mmap(-1, _NOTE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        child = os.fork()
        if not child:
            code = 1
            try:
                _limit()
                answer.write_bytes(_packed(work(note)))
                code = 0
            finally:
                os._exit(code)
        status = _wait(child, note)
        if status == 0:
            return _unpacked(answer.read_bytes())
    kind = "hang" if status is None else "crash"
    what = "the process fell silent" if status is None else f"the process ended with {status}"
    name, data = _noted(note)
    return Batch(1, [Finding(name, kind, what, data)] if name in targets else [])


def _wait(child: int, note: mmap.mmap) -> int | None:
    """The child's status; None if it was silent for too long and was ended."""
    seen, since = b"", time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if note[:8] != seen:
            seen, since = note[:8], time.monotonic()
        elif time.monotonic() - since > SILENCE_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)


def fuzz(targets: Mapping[str, Target], corpus: Mapping[str, list[bytes]], seed: str, seconds: float) -> Batch:
    """Mutate and parse in a child for so long."""

    def work(note: mmap.mmap) -> Batch:
        chance, batch, names = random.Random(seed), Batch(), list(targets)
        known: dict[str, set[str]] = {name: {judge(targets[name], data)[1] for data in corpus[name]} for name in names}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(batch.findings) < 20:
            name = names[batch.executions % len(names)]
            data = mutated(targets[name], chance.choice(corpus[name]), corpus[name], chance)
            batch.executions += 1
            _note(note, batch.executions, name, data)
            kind, what = judge(targets[name], data)
            if what not in known[name]:
                known[name].add(what)
                if kind:
                    batch.findings.append(Finding(name, kind, what, data))
                else:
                    batch.fresh.append((name, data))
        batch.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        return batch

    return in_child(work, targets)


def judge_in_child(target: Target, data: bytes) -> Finding | None:
    """One input on its own, as the replay and the minimiser see it."""

    def work(note: mmap.mmap) -> Batch:
        _note(note, 1, target.name, data)
        kind, what = judge(target, data)
        return Batch(1, [Finding(target.name, kind, what, data)] if kind else [])

    found = in_child(work, {target.name: target}).findings
    return found[0] if found else None


def minimized(target: Target, finding: Finding, seconds: float = 10.0) -> Finding:
    """The same finding with as much taken away as goes in the time."""
    end, best = time.monotonic() + seconds, finding
    size = max(1, len(best.data) // 2)
    while size and time.monotonic() < end:
        at = 0
        while at < len(best.data) and time.monotonic() < end:
            smaller = judge_in_child(target, best.data[:at] + best.data[at + size :])
            if smaller is not None and smaller.kind == finding.kind:
                best = smaller
            else:
                at += size
        size //= 2
    return best


def _note(note: mmap.mmap, number: int, name: str, data: bytes) -> None:
    label = name.encode()
    data = data[: _NOTE_BYTES - 100]
    note[:16] = struct.pack("<QII", number, len(label), len(data))
    note[16 : 16 + len(label) + len(data)] = label + data


def _noted(note: mmap.mmap) -> tuple[str, bytes]:
    _, label, size = struct.unpack("<QII", note[:16])
    return note[16 : 16 + label].decode(), note[16 + label : 16 + label + size]


def _packed(batch: Batch) -> bytes:
    findings = [[found.target, found.kind, found.what, found.data.hex()] for found in batch.findings]
    fresh = [[name, data.hex()] for name, data in batch.fresh]
    return json.dumps([batch.executions, findings, fresh, batch.grown_bytes]).encode()


def _unpacked(text: bytes) -> Batch:
    executions, findings, fresh, grown = json.loads(text)
    return Batch(
        executions,
        [Finding(target, kind, what, bytes.fromhex(data)) for target, kind, what, data in findings],
        [(name, bytes.fromhex(data)) for name, data in fresh],
        grown,
    )
