"""Runs programs on two ranks with torch alone: a process that imports torch once, and forks the ranks of each program.

Started as a script. Each line of its input is a JSON object: the program's `path`, the `port` of a store, and
`deadline_s`. Each line of its output is one too: what the ranks printed, in the order of the ranks, and whether they
had to be killed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch._dynamo
import torch.distributed.tensor

RANKS = 2


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(order["path"], order["port"], order["deadline_s"])), flush=True)


def run(path: str, port: int, deadline_s: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="holdfast-upstream-") as folder:
        printed = [Path(folder, str(rank)) for rank in range(RANKS)]
        running = {_fork(path, port, rank, printed[rank]) for rank in range(RANKS)}
        end = time.monotonic() + deadline_s
        while running and time.monotonic() < end:
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {"output": "".join(file.read_text() for file in printed), "killed": len(running)}


def _fork(path: str, port: int, rank: int, printed: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    with printed.open("w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        sys.stdout = file
        warnings.simplefilter("ignore")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")  # as torchrun sets them
        torch.set_num_threads(1)
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:  # noqa: BLE001 - printed, so that the page's output differs
            traceback.print_exc(file=file)
        if any(name.partition(".")[0] == "holdfast" for name in sys.modules):
            print("holdfast was imported: this is not torch alone", file=file)
    os._exit(0)


if __name__ == "__main__":
    main()
