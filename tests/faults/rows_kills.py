"""Trainers that are killed at random times, and those that are told to go, or go without a word."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import holdfast
from tests.dist.harness import CONTEXT
from tests.faults.cases import (
    BLOCK_BYTES,
    DEADLINE_S,
    Hung,
    Lost,
    NotInjected,
    Wrong,
    begin_again,
    chance,
    check_root,
    fresh_root,
    run_cases,
    state_of,
)
from tests.faults.row import Row, Tally
from tests.faults.writers import FAULT, faulty_writers

KILLS, AT_ONCE = 50, 2
RANDOM = "SIGKILL at random times"
ENDINGS = "SIGTERM, SIGINT, exit without waiting, exception in the writer"
_STEPS = 400


class Victim:
    """A process that trains and saves; it tells its writer's number, and of every step that is acknowledged."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._line, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=quietly, args=(target, theirs, *arguments), daemon=False)
        self.process.start()
        theirs.close()
        self.writers: list[int] = []
        self.acknowledged: dict[int, set[float]] = {}
        self.said: list[Any] = []

    def hear(self, timeout_s: float) -> bool:
        """One word, if it comes in time; False also when the line is cut."""
        try:
            if not self._line.poll(timeout_s):
                return False
            what, value = self._line.recv()
        except (EOFError, OSError):
            return False
        if what == "writer":
            self.writers.append(value)
        elif what == "saved":
            self.acknowledged[value] = {value}
        else:
            self.said.append(value)
        return True

    def hear_all(self) -> None:
        while self.hear(0.0):
            pass

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        self.hear_all()

    def end(self, within_s: float) -> int | None:
        """Wait until it has gone by itself; its exit code."""
        self.process.join(within_s)
        late = self.process.is_alive()
        self.kill()
        if late:
            raise Hung(f"the process was still there after {within_s} s")
        return self.process.exitcode


def quietly(target: Callable[..., None], *arguments: Any) -> None:
    """What a dying process has to say on standard error is expected; an interrupt reaches it as one that users run.

    A shell starts what it runs in the background with interrupts ignored, and processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    target(*arguments)


def kill_process(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def train(line: Any, root: str, wait: bool) -> None:
    """Save in a loop; a step is acknowledged when the handle says so."""
    checkpointer = holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES)
    pending: list[holdfast.SaveHandle] = []
    for step in range(_STEPS):
        pending.append(checkpointer.save(step, state_of(step)))
        if not step:
            background: Any = checkpointer._engine.background
            line.send(("writer", background.writer.pid))
        if wait or len(pending) > 1:
            done = pending.pop(0)
            done.result(DEADLINE_S)
            line.send(("saved", done.step))


def kill_at_random(seed: int, number: int) -> None:
    """Kill a trainer after a while; its writer goes on, or dies with it, before it or after it."""
    random = chance(seed, RANDOM, number)
    with fresh_root() as root:
        victim = Victim(train, str(root), random.random() < 0.5)
        if not victim.hear(DEADLINE_S) or not victim.writers:
            raise Lost("the trainer did not begin")
        how = random.choice(["trainer", "trainer", "both", "writer first"])
        time.sleep(random.uniform(0.0, 0.25))
        if how == "writer first":
            kill_process(victim.writers[0])
            time.sleep(random.uniform(0.0, 0.02))
        victim.kill()
        if how == "both":
            time.sleep(random.uniform(0.0, 0.02))
            kill_process(victim.writers[0])
        check_root(root, victim.acknowledged)
        begin_again(root, victim.acknowledged)


def random_kills(seed: int, count: int = KILLS) -> Tally:
    cases = [(f"number {number}", partial(kill_at_random, seed, number)) for number in range(count)]
    return run_cases(RANDOM, seed, cases, at_once=AT_ONCE)


def train_and_end(line: Any, root: str, ending: str) -> None:
    """Save step 1, begin to save step 2, and end in one way or another."""
    checkpointer = holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES, grace_s=DEADLINE_S)
    checkpointer.save(1, state_of(1)).result(DEADLINE_S)
    line.send(("saved", 1))
    checkpointer.save(2, state_of(2))
    if ending in ("SIGTERM", "SIGINT"):
        line.send(("said", "ready"))
        time.sleep(600)
    elif ending == "exit":
        sys.exit(3)
    elif ending == "raise":
        raise RuntimeError("training failed")
    elif ending == "del":
        del checkpointer
    else:
        os._exit(4)


def end_one_way(ending: str) -> None:
    """What was begun is finished before the process goes, or by its writer afterwards."""
    with fresh_root() as root:
        victim = Victim(train_and_end, str(root), ending)
        if ending in ("SIGTERM", "SIGINT"):
            while not victim.said:
                if not victim.hear(DEADLINE_S):
                    raise Lost("the trainer did not begin")
            os.kill(victim.process.pid or 0, getattr(signal, ending))
        code = victim.end(DEADLINE_S)
        expected = {"SIGTERM": -signal.SIGTERM, "SIGINT": 1, "exit": 3, "raise": 1, "del": 0, "os._exit": 4}[ending]
        if code != expected:
            raise Lost(f"{ending}: exit code {code}, expected {expected}")
        begin_again(root, {**victim.acknowledged, 2: {2.0}})


def fail_in_writer(call: str, text: str, number: int) -> None:
    """One error inside of the writer: the save fails and says why, training goes on, the next save works."""
    with fresh_root() as root, faulty_writers():
        with holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES) as checkpointer:
            os.environ[FAULT] = f"{call}:{text}:{number}:error"
            first = checkpointer.save(1, state_of(1))
            os.environ.pop(FAULT)
            if not first.wait(DEADLINE_S):
                raise Hung("no word of the save")
            if first.error is None:
                raise NotInjected
            if "Input/output error" not in str(first.error):
                raise Wrong(f"the error does not say what happened: {first.error}")
            check_root(root, {})
            checkpointer.save(2, state_of(2)).result(DEADLINE_S)
        begin_again(root, {2: {2.0}})


_ERRORS = [
    ("pwritev", "safetensors", 1),
    ("fsync", "safetensors", 1),
    ("fsync", "holdfast.json", 1),
    ("mkdir", ".attempt-", 1),
    ("rename", "step-", 1),
    ("rename", "report-0", 1),
]


def endings(seed: int, chosen: Sequence[str] = ()) -> Tally:
    """End trainers in each way, and fail each call of a writer once; `chosen` names some of these cases."""
    ways = ("SIGTERM", "SIGINT", "exit", "raise", "del", "os._exit")
    cases = [(way, partial(end_one_way, way)) for way in ways]
    cases += [(f"{call} of {text}", partial(fail_in_writer, call, text, number)) for call, text, number in _ERRORS]
    return run_cases(ENDINGS, seed, [case for case in cases if not chosen or case[0] in chosen])


ROWS = (Row(RANDOM, random_kills), Row(ENDINGS, endings))
