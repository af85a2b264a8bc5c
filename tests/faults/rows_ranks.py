"""One rank of four dies, pauses, or has a storage that never answers, in every phase of a save.

The others raise, or warn and go on, within the deadline; nothing appears that is not whole; the
next run starts, restores what was acknowledged, and saves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast
from tests.dist.harness import Victims, tell_parent
from tests.faults.cases import (
    BLOCK_BYTES,
    DEADLINE_S,
    Hung,
    Lost,
    begin_again,
    check_root,
    fresh_root,
    run_cases,
    state_of,
)
from tests.faults.row import Row, Tally
from tests.faults.writers import faulty_writers

RANKS = "rank dies in each phase x each of 4 ranks; rank paused; storage that never answers"
WORLD = 4
START_S, SAVE_S, SILENCE_S, SLACK_S = 60.0, 8.0, 2.0, 6.0
AT_ONCE = 4  # they wait for deadlines most of the time


@dataclass(frozen=True, slots=True)
class Blow:
    """What strikes one rank: in a phase of the trainer, or at a call of its writer."""

    rank: int
    phase: str
    action: str

    @property
    def in_trainer(self) -> bool:
        return self.phase in _TRAINER


# Functions of the BackgroundSaver and its Planner that a trainer is struck in.
_TRAINER = {"planning": "plan_layout", "agreeing": "_agree", "capturing": "_hand_over"}
# Calls of the writer: `os.call` of a path with the text in it.
_WRITER = {
    "beginning": "mkdir:.attempt-",
    "writing": "pwritev:.safetensors",
    "syncing": "fsync:.safetensors",
    "reporting": "rename:report-",
    "publishing": "rename:/step-",
    "hearing": "rename:seen-",
}


def _strike(action: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if action == "rank" else signal.SIGSTOP)


def _arm(blow: Blow, background: Any, when: Path) -> None:
    """In the trainer that is to be struck: the fault is set for the next save."""
    if not blow.in_trainer:
        when.touch()
        return
    if blow.phase == "planning":
        background = background._planner
        background.drop()
    setattr(background, _TRAINER[blow.phase], lambda *arguments, **options: _strike(blow.action))


def save_under(root: str, blow: Blow) -> None:
    """Step 1 is acknowledged; step 2 is struck; ranks that live say how they heard of it, and when."""
    warnings.simplefilter("ignore")
    own = dist.get_rank() == blow.rank
    when = Path(root).with_name("struck")
    fault = f"{_WRITER[blow.phase]}:1:{blow.action}" if own and not blow.in_trainer else ""
    checkpointer = holdfast.Checkpointer(root, deadline_s=SAVE_S, silence_s=SILENCE_S, block_bytes=BLOCK_BYTES)
    with faulty_writers(fault, str(when)):
        checkpointer.save(1, state_of(1)).result(START_S)
    background: Any = checkpointer._engine.background
    if own:
        _arm(blow, background, when)
    tell_parent(background.writer.pid)
    started = time.monotonic()
    handle = checkpointer.save(2, state_of(2))
    known = handle.wait(SAVE_S + SLACK_S)
    tell_parent([time.monotonic() - started, known, str(handle.error or "")])
    if blow.action == "hang":
        last = checkpointer.save(3, state_of(3))
        last.wait(DEADLINE_S)
        tell_parent(str(last.error or ""))
    time.sleep(600)


def strike(blow: Blow) -> None:
    with fresh_root() as root:
        victims = Victims(WORLD, save_under, str(root), blow)
        writers: list[int] = []
        acknowledged = {1: {1.0}}
        try:
            writers = victims.hear(START_S)
            heard = _hear_of(victims, blow)
            if any(known and not error for _, known, error in heard.values()):
                acknowledged[2] = {2.0}
            if blow.action == "hang":
                for rank, error in _hear_each(victims, range(WORLD), DEADLINE_S).items():
                    if error:
                        raise Lost(f"rank {rank}: the save after the one that hung: {error}")
                acknowledged[3] = {3.0}
            _check_struck(victims, blow)
        finally:
            victims.kill()
            if blow.action == "stop" and writers:
                _kill(writers[blow.rank])
        check_root(root, acknowledged)
        begin_again(root, acknowledged)


def _hear_of(victims: Victims, blow: Blow) -> dict[int, Any]:
    """What the ranks that can speak say of the save that was struck; the others must know in time.

    A rank whose own writer hangs learns of it when it saves the next time.
    """
    speaking = [rank for rank in range(WORLD) if rank != blow.rank or blow.action == "hang"]
    heard = _hear_each(victims, speaking, SAVE_S + 2 * SLACK_S)
    for rank, (seconds, known, _) in heard.items():
        if rank != blow.rank and not (known and seconds < SAVE_S + SLACK_S):
            raise Hung(f"rank {rank} knew nothing of the save after {seconds:.1f} s")
    return heard


def _check_struck(victims: Victims, blow: Blow) -> None:
    """A fault that did not happen proves nothing."""
    process = victims.processes[blow.rank]
    if blow.action == "rank":
        process.join(SLACK_S)
    if process.is_alive() == (blow.action == "rank"):
        raise Lost("the rank was not struck")


def _hear_each(victims: Victims, ranks: Any, deadline_s: float) -> dict[int, Any]:
    end = time.monotonic() + deadline_s
    heard = {}
    for rank in ranks:
        good, value = victims.hear_one(rank, max(0.0, end - time.monotonic()))
        if not good:
            raise Lost(f"rank {rank}: {value}")
        heard[rank] = value
    return heard


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def blows() -> list[Blow]:
    """Every phase on every rank, then pauses and hangs."""
    deaths = [*_TRAINER, "writing", "reporting"]
    struck = [Blow(rank, phase, "rank") for phase in deaths for rank in range(WORLD)]
    struck += [Blow(0, "publishing", "rank"), *(Blow(rank, "hearing", "rank") for rank in range(1, WORLD))]
    struck += [Blow(1, "agreeing", "stop"), Blow(2, "capturing", "stop"), Blow(3, "writing", "stop")]
    hangs = [(0, "beginning"), (2, "writing"), (1, "syncing"), (0, "publishing")]
    return struck + [Blow(rank, phase, "hang") for rank, phase in hangs]


def strike_ranks(seed: int, chosen: list[Blow] | None = None) -> Tally:
    cases = [(f"{blow.action}, {blow.phase}, rank {blow.rank}", partial(strike, blow)) for blow in chosen or blows()]
    return run_cases(RANKS, seed, cases, limit_s=120.0, at_once=AT_ONCE)


ROWS = (Row(RANKS, strike_ranks),)
