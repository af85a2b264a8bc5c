"""Local ranks as processes that can be watched and killed one by one, unlike under torchrun; for the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch.distributed as dist

from holdfast.core.errors import PeerFailed, TimedOut

_LOOK_S = 0.05
_TAIL = 30


class LocalRanks:
    """Runs a `holdfast` command line on ranks of this machine; each rank has its own log file."""

    def __init__(self, count: int, arguments: Sequence[str], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"rank-{rank}.log" for rank in range(count)]
        # Served from here, as torchrun does: a port that is free when it is chosen may be taken when rank 0 binds it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs):
            with log.open("wb") as file:
                self._processes.append(_start(rank, count, self._store.port, arguments, file))

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        self._processes[rank].send_signal(signal.SIGKILL)

    def alive(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def finish(self, deadline_s: float, look: Callable[[], object] = lambda: None) -> None:
        """Wait until all ranks exit, and call `look` meanwhile; PeerFailed has the last log lines of a failed rank."""
        end = time.monotonic() + deadline_s
        while self.alive():
            look()
            if any(process.poll() not in (None, 0) for process in self._processes):
                self.end(10.0)
                break
            if time.monotonic() > end:
                self.end(0.0)
                raise TimedOut(f"the ranks did not finish within {deadline_s:.0f} s: see {self._logs[0].parent}")
            time.sleep(_LOOK_S)
        for rank, process in enumerate(self._processes):
            if process.returncode:
                tail = self._logs[rank].read_text(errors="replace").splitlines()[-_TAIL:]
                raise PeerFailed(f"rank {rank} exited with {process.returncode}:\n" + "\n".join(tail))

    def end(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the ranks to notice a failed peer and exit, then kill the rest."""
        end = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < end:
            time.sleep(_LOOK_S)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _start(rank: int, count: int, port: int, arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "holdfast", *arguments]
    environment = os.environ | place | meeting | quiet
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: S603  (this interpreter, this package)
