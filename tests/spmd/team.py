"""Four ranks that take cases one by one; a case that hangs ends them, and four others go on.

Ranks are processes with a gloo group, or, for speed, threads of one process with torch's threaded group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.spmd.cases import Case
from tests.spmd.judge import Verdict

WORLD = 4
START_S = 90.0
CASE_S = 120.0  # for the first answer
ALONE_CASE_S = 30.0
STRAGGLER_S = 15.0  # for the last answer after the first; torch alone, which hangs often, is waited for less long
ALONE_STRAGGLER_S = 5.0
# errors within torch that threads posing as ranks can race to; processes never do
RACES = ("PyHandleCache.h", "'DTensorSpec' object has no attribute '__qualname__'")

# torch takes either of two ways that cost it the same as hashes fall; their bytes may differ, where shards are padded
os.environ.setdefault("PYTHONHASHSEED", "0")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "tests.spmd.rank"])


@dataclass(frozen=True, slots=True)
class Finding:
    """What four ranks found together."""

    case: Case
    outcome: str  # right, wrong, raise, hang, or talk: right, but with more bytes than the table declares
    detail: str
    bytes: int

    @property
    def is_right(self) -> bool:
        return self.outcome in ("right", "talk")


class Team:
    """Four processes with a gloo group; started when needed, killed when stuck."""

    def __init__(self, enable: bool, threads: bool = False, device: str = "cpu"):
        self._device = device
        self._enable = enable
        self._threads = threads
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._folder: Any = None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def find(self, cases: Iterable[Case]) -> Iterator[Finding]:
        """The finding of each case, in order."""
        for case in cases:
            finding = self._find(case)
            raced = finding.outcome == "crash" or any(race in finding.detail for race in RACES)
            if self._threads and (raced or (self._enable and finding.outcome == "hang")):  # threads race within torch
                self._end()
                finding = self._find_with_processes(case)
            yield replace(finding, outcome="hang") if finding.outcome == "crash" else finding

    def _find_with_processes(self, case: Case) -> Finding:
        """Judge a case again that threads may have raced in: processes hang only where the rules do."""
        with Team(self._enable, threads=False, device=self._device) as team:
            return team._find(case)

    def _start(self) -> None:
        from tests.spmd.rank import host_main, rank_main

        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-spmd-")
        pairs = [CONTEXT.Pipe() for _ in range(WORLD)]
        theirs = [pair[1] for pair in pairs]
        self._pipes = [pair[0] for pair in pairs]
        if self._threads:
            self._processes = [
                CONTEXT.Process(target=host_main, args=(WORLD, theirs, self._enable, self._device), daemon=True)
            ]
        else:
            self._processes = [
                CONTEXT.Process(
                    target=rank_main,
                    args=(rank, WORLD, self._folder.name, pipe, self._enable, self._device),
                    daemon=True,
                )
                for rank, pipe in enumerate(theirs)
            ]
        for process in self._processes:
            process.start()
        for pipe in theirs:
            pipe.close()
        answers = self._hear(START_S, START_S)
        if any(answer != "ready" for answer in answers):
            raise RuntimeError(f"the ranks did not start: {answers}")

    def _hear(self, first_s: float, straggler_s: float) -> list[Any]:
        """Each rank's answer; None from one that did not answer in time, or died."""
        answers: list[Any] = [None] * WORLD
        waiting = dict(zip(self._pipes, range(WORLD), strict=True))
        deadline = time.monotonic() + first_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    answers[rank] = pipe.recv()
                deadline = min(deadline, time.monotonic() + straggler_s)
        return answers

    def _find(self, case: Case) -> Finding:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(case)
        patience_s = (CASE_S, STRAGGLER_S) if self._enable else (ALONE_CASE_S, ALONE_STRAGGLER_S)
        verdicts = self._hear(*patience_s)
        if None in verdicts:
            dead = [process.exitcode for process in self._processes if process.exitcode is not None]
            self._end()
            if dead:
                return Finding(case, "crash", f"a rank died with exit code {dead[0]}", 0)
            if not any(verdicts):
                return Finding(case, "crash", "no rank answered in time", 0)
            raised = [verdict.detail for verdict in verdicts if verdict and verdict.outcome == "raise"]
            return Finding(case, "hang", raised[0] if raised else "no rank answered in time", 0)
        return conclude(case, verdicts)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def conclude(case: Case, verdicts: list[Verdict]) -> Finding:
    """One finding of four verdicts: ranks that disagree have diverged, which in a longer program is a hang."""
    outcomes = {verdict.outcome for verdict in verdicts}
    moved = max(verdict.bytes for verdict in verdicts)
    if "wrong" in outcomes:
        return Finding(case, "wrong", next(v.detail for v in verdicts if v.outcome == "wrong"), moved)
    if outcomes == {"raise"}:
        return Finding(case, "raise", verdicts[0].detail, moved)
    if "raise" in outcomes:
        return Finding(case, "hang", next(v.detail for v in verdicts if v.outcome == "raise"), moved)
    if len({verdict.digest for verdict in verdicts}) > 1:
        return Finding(case, "wrong", "replicas drew different numbers", moved)
    allowed = verdicts[0].allowed
    if allowed is not None and moved > allowed:
        return Finding(case, "talk", f"{moved} bytes where the table allows {allowed}", moved)
    return Finding(case, "right", verdicts[0].detail, moved)
