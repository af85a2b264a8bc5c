"""Writers and savers that are killed at one system call after another, and the order of those calls.

With strace where it may attach; else the functions of Python's `os` stand for the system calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.core.names import step_folder
from tests.dist.harness import CONTEXT
from tests.faults import strace
from tests.faults.cases import (
    BLOCK_BYTES,
    DEADLINE_S,
    Case,
    Hung,
    Lost,
    NotInjected,
    afterwards,
    begin_again,
    chance,
    check_root,
    fresh_root,
    run_cases,
    state_of,
)
from tests.faults.order import check_order, recorded
from tests.faults.row import Row, Tally
from tests.faults.writers import FAULT, faulty_writers

WRITERS, SAVERS = 70, 36
_TRACE = "trace=" + ",".join(strace.CALLS)
_FUNCTIONS = ("open", "mkdir", "pwritev", "fsync", "rename", "close", "unlink", "fstat", "scandir")
KILLED = "SIGKILL at system call k" + (f" (os calls: {strace.problem()})" if strace.problem() else "")
ORDER = "order of system calls" + (f" (os calls: {strace.problem()})" if strace.problem() else "")


class Run:
    """A run in this process whose writer is killed at a place of the next save, again and again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.step = 0
        self.acknowledged: dict[int, set[float]] = {}
        self.checkpointer = holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES)
        self.save()

    @property
    def writer(self) -> int:
        background: Any = self.checkpointer._engine.background
        return int(background.writer.pid)

    def save(self) -> None:
        """A save that nothing disturbs: training goes on."""
        self.step += 1
        self.checkpointer.save(self.step, state_of(self.step)).result(DEADLINE_S)
        self.acknowledged[self.step] = {self.step}

    def places(self, replace: bool) -> list[tuple[str, int]]:
        with strace.attached(self.writer, _TRACE) as traced:
            self.save() if not replace else self.save_again()
        return strace.places(traced)

    def save_again(self) -> None:
        """The newest step once more, with other content."""
        self.checkpointer.save(self.step, state_of(self.step + 0.5)).result(DEADLINE_S)
        self.acknowledged[self.step] = {self.step + 0.5}

    def kill_at(self, call: str, k: int, replace: bool) -> None:
        """Save while the writer is killed at the k-th `call`; then look, and save again."""
        self.save()
        writer = self.writer
        value = self.step + 0.5 if replace else self.step + 1
        if replace:
            self.acknowledged[self.step] = {self.step, value}
        else:
            self.step += 1
        with strace.attached(writer, _TRACE, f"inject={call}:signal=SIGKILL:when={k}"):
            handle = self.checkpointer.save(self.step, state_of(value))
            if not handle.wait(DEADLINE_S):
                raise Hung("no word of the save")
        if handle.error is None:
            self.acknowledged[self.step] = {value}
        check_root(self.root, self.acknowledged)
        if handle.error is None and Path(f"/proc/{writer}").exists():
            raise NotInjected
        self.save()
        self._forget_old()

    def _forget_old(self) -> None:
        """Old steps have been looked at often enough."""
        for step in sorted(self.acknowledged)[:-3]:
            holdfast.storage.storage_at(self.root).remove(step_folder(step))
            del self.acknowledged[step]

    def end(self) -> None:
        self.checkpointer.close()
        begin_again(self.root, self.acknowledged)


def save_when_told(root: str, line: Any) -> None:
    """A process that saves step 1, and when it is told step 2, waiting for it."""
    path = Path(root)
    holdfast.save(path / step_folder(1), state_of(1), step=1, block_bytes=BLOCK_BYTES)
    line.send(True)
    again = line.recv()
    holdfast.save(path / step_folder(again), state_of(2), step=again, block_bytes=BLOCK_BYTES)
    line.send(True)


def _saver(root: Path, *expressions: str, again: int) -> tuple[list[strace.Call], int]:
    """Run that process under strace; the trace and the exit code."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=save_when_told, args=(str(root), theirs), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(DEADLINE_S) or not ours.recv():
        raise Lost("the first save failed")
    with strace.attached(process.pid or 0, *expressions) as traced:
        ours.send(again)
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
            raise Hung("the saver is still at work")
    return traced, process.exitcode or 0


def kill_saver(call: str, k: int, again: int) -> None:
    with fresh_root() as root:
        root.mkdir()
        _, code = _saver(root, _TRACE, f"inject={call}:signal=SIGKILL:when={k}", again=again)
        if code == 0:
            raise NotInjected
        acknowledged = {1: {1.0} if again != 1 else {1.0, 2.0}}
        check_root(root, acknowledged)
        begin_again(root, acknowledged)


def kill_in_writer(function: str, k: int) -> None:
    """Without strace: the writer's own `os.function` kills it."""
    with fresh_root() as root, faulty_writers():
        os.environ[FAULT] = f"{function}:{root}:{k}:kill"
        with holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES) as checkpointer:
            handle = checkpointer.save(1, state_of(1))
            os.environ.pop(FAULT)
            if not handle.wait(DEADLINE_S):
                raise Hung("no word of the save")
            check_root(root, {} if handle.error else {1: {1.0}})
            if handle.error is None:
                raise NotInjected
            checkpointer.save(2, state_of(2)).result(DEADLINE_S)
        begin_again(root, {2: {2.0}})


def _pick(seed: int, name: str, found: list[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    return chance(seed, name).sample(found, min(count, len(found)))


def _writer_cases(seed: int, run: Run, count: int) -> Iterator[Case]:
    for replace in (False, True):
        for call, k in _pick(seed, f"writer {replace}", run.places(replace), count // 2):
            yield f"writer, {call} {k}, replace={replace}", partial(run.kill_at, call, k, replace)


def _saver_cases(seed: int, count: int) -> Iterator[Case]:
    for again in (2, 1):
        with fresh_root() as root:
            root.mkdir()
            traced, _ = _saver(root, _TRACE, again=again)
        for call, k in _pick(seed, f"saver {again}", strace.places(traced), count // 2):
            yield f"saver of step {again}, {call} {k}", partial(kill_saver, call, k, again)


def kill_at_system_calls(seed: int, writers: int = WRITERS, savers: int = SAVERS) -> Tally:
    if strace.problem():
        places = [(function, k) for function in _FUNCTIONS for k in range(1, 16)]
        cases = [
            (f"{function} {k}", partial(kill_in_writer, function, k))
            for function, k in _pick(seed, "os", places, writers + savers)
        ]
        return run_cases(KILLED, seed, cases)
    with ExitStack() as stack:
        run = Run(stack.enter_context(fresh_root()))
        stack.callback(run.checkpointer.close)
        tally = run_cases(KILLED, seed, _writer_cases(seed, run, writers))
        tally += afterwards(KILLED, seed, run.end)
    return tally + run_cases(KILLED, seed, _saver_cases(seed, savers), at_once=2)


def _order_of_writer(replace: bool) -> None:
    with fresh_root() as root:
        run = Run(root)
        try:
            with strace.attached(run.writer, _TRACE) as traced:
                run.save_again() if replace else run.save()
            check_order(traced, root, step_folder(run.step))
        finally:
            run.checkpointer.close()


def _order_of_saver(again: int) -> None:
    with fresh_root() as root:
        root.mkdir()
        traced, _ = _saver(root, _TRACE, again=again)
        check_order(traced, root, step_folder(again))


def _order_of_functions() -> None:
    """Without strace: what this process asks of `os` while it saves."""
    with fresh_root() as root:
        root.mkdir()
        with recorded() as calls:
            holdfast.save(root / step_folder(1), state_of(1), step=1, block_bytes=BLOCK_BYTES)
        check_order(calls, root, step_folder(1))


def order_of_system_calls(seed: int) -> Tally:
    if strace.problem():
        return run_cases(ORDER, seed, [("a fresh save", _order_of_functions)])
    cases = [
        ("a fresh save", partial(_order_of_writer, False)),
        ("a step saved again", partial(_order_of_writer, True)),
        ("a fresh save that waits", partial(_order_of_saver, 2)),
        ("a step saved again that waits", partial(_order_of_saver, 1)),
    ]
    return run_cases(ORDER, seed, cases)


ROWS = (Row(KILLED, kill_at_system_calls), Row(ORDER, order_of_system_calls))
