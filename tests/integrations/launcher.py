"""Ranks for tests of frameworks: one process imports the framework, and forks each rank of each scenario.

Importing a framework takes 5 to 25 s, a scenario of a few steps 3 to 10 s.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

DEADLINE_S = 300.0
START_S = 600.0  # on a machine that others use too
PEERS_S = 30.0  # how long ranks may go on once one has failed


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank ended: its value, or its traceback, and what it printed."""

    value: Any
    error: str | None
    killed: bool
    output: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """One function on `world` ranks, all of them killed `after_s` seconds after one creates the file `kill_file`."""

    world: int
    function: Callable[..., Any] | str
    arguments: tuple[Any, ...]
    environment: Mapping[str, str]
    deadline_s: float
    kill_file: str | None = None
    after_s: float = 0.0
    peers_s: float = PEERS_S


class Launcher:
    """A process that has imported `modules`, and runs scenarios one after another. Use as a context manager."""

    def __init__(self, modules: Sequence[str]):
        ours, theirs = os.pipe(), os.pipe()
        command = [sys.executable, "-m", "tests.integrations.launcher", str(theirs[0]), str(ours[1]), *modules]
        self._process = subprocess.Popen(command, pass_fds=(theirs[0], ours[1]))
        os.close(theirs[0])
        os.close(ours[1])
        self._in = Connection(ours[0], writable=False)
        self._out = Connection(theirs[1], readable=False)
        self._ready = False

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._in.close()

    def run(
        self,
        world: int,
        function: Callable[..., Any] | str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        kill_file: str | os.PathLike[str] | None = None,
        after_s: float = 0.0,
        peers_s: float = PEERS_S,
    ) -> list[RankOutcome]:
        """Call `function(*arguments)` on every rank and return how each rank ended, in rank order.

        The function must be importable, or the text "module:name" where the test itself is not to import what
        the module imports. Ranks find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in
        the environment; the framework makes the process group.
        """
        if not self._ready:
            self._answer(START_S)
            self._ready = True
        killed_at = None if kill_file is None else os.fspath(kill_file)
        scenario = Scenario(
            world, function, arguments, dict(environment or {}), deadline_s, killed_at, after_s, peers_s
        )
        self._out.send(scenario)
        outcomes: list[RankOutcome] = self._answer(deadline_s + 30.0)
        return outcomes

    def values(self, world: int, function: Callable[..., Any] | str, *arguments: Any, **options: Any) -> list[Any]:
        """Run a scenario and return what each rank returned; fail with the tracebacks and outputs otherwise."""
        outcomes = self.run(world, function, *arguments, **options)
        failures = [
            f"rank {rank}: {outcome.error or 'killed'}\n{outcome.output[-3000:]}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None or outcome.killed
        ]
        assert not failures, "\n".join(failures)
        return [outcome.value for outcome in outcomes]

    def _answer(self, deadline_s: float) -> Any:
        if not self._in.poll(deadline_s):
            raise TimeoutError(f"the launcher did not answer within {deadline_s} s")
        return self._in.recv()


def _serve(requests: Connection, answers: Connection) -> None:
    answers.send("ready")
    while True:
        try:
            scenario: Scenario = requests.recv()
        except EOFError:
            return
        answers.send(_run(scenario))


def _run(scenario: Scenario) -> list[RankOutcome]:
    with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            pids = [_fork(scenario, rank, folder, meeting) for rank in range(scenario.world)]
        statuses = _wait(pids, scenario)
        return [_outcome(folder, rank, status) for rank, status in enumerate(statuses)]


def _fork(scenario: Scenario, rank: int, folder: Path, meeting: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _rank_main(scenario, rank, folder, meeting)
        finally:
            os._exit(status)
    return pid


def _rank_main(scenario: Scenario, rank: int, folder: Path, meeting: socket.socket) -> int:
    os.setsid()
    output = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(scenario.world),
        "LOCAL_WORLD_SIZE": str(scenario.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting.getsockname()[1]),
        **scenario.environment,
    }
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = _serve_store(meeting) if rank == 0 else None
    meeting.close()
    try:
        value, error = _resolved(scenario.function)(*scenario.arguments), None
    except BaseException:  # noqa: BLE001  (the test must see it)
        value, error = None, traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps((value, error)))
    with contextlib.suppress(Exception):
        if dist.is_initialized() and error is None:
            dist.destroy_process_group()
    del store
    return 0 if error is None else 1


def _resolved(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _serve_store(meeting: socket.socket) -> dist.Store:
    """Serve the ranks' store on a socket that listens already; env:// finds the server, as both are multi-tenant.

    A port that is free when it is chosen may be another process's when it is bound.
    """
    import torch.distributed as dist

    host, port = meeting.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=meeting.detach()
    )


def _wait(pids: list[int], scenario: Scenario) -> list[int | None]:
    """Return the exit status of each rank; negative signal numbers for killed ones, None past the deadline.

    Once a rank has failed, the others, which may wait for it in a collective, have `peers_s` left.
    """
    end = time.monotonic() + scenario.deadline_s
    statuses: dict[int, int | None] = {}
    kill_at: float | None = None
    while len(statuses) < len(pids):
        for pid in [pid for pid in pids if pid not in statuses]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid]:
                    end = min(end, time.monotonic() + scenario.peers_s)
        now = time.monotonic()
        if scenario.kill_file is not None and kill_at is None and Path(scenario.kill_file).exists():
            kill_at = now + scenario.after_s
        if (kill_at is not None and now >= kill_at) or now >= end:
            for pid in [pid for pid in pids if pid not in statuses]:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                statuses[pid] = None if now >= end else os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def _outcome(folder: Path, rank: int, status: int | None) -> RankOutcome:
    output = (folder / f"{rank}.log").read_text(errors="replace") if (folder / f"{rank}.log").exists() else ""
    if status == -signal.SIGKILL:
        return RankOutcome(None, None, killed=True, output=output)
    if status is None:
        return RankOutcome(
            None, "it did not end before the deadline, or soon after another rank failed", killed=False, output=output
        )
    result = folder / f"{rank}.pickle"
    if not result.exists():
        return RankOutcome(None, f"exit status {status} without a result", killed=False, output=output)
    value, error = pickle.loads(result.read_bytes())
    return RankOutcome(value, error, killed=False, output=output)


def main() -> None:
    """Import the modules, then serve scenarios until the parent closes its end."""
    requests, answers = Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False)
    for name in sys.argv[3:]:
        importlib.import_module(name)
    _serve(requests, answers)


if __name__ == "__main__":
    # As the module whose classes the parent pickles, not as __main__.
    importlib.import_module("tests.integrations.launcher").main()
