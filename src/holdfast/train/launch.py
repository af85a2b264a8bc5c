"""Launch of ranks: torchrun for local ranks with signals forwarded, the process group, the device of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument


def is_rank() -> bool:
    """Return True if torchrun or a similar launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_ranks_command(count: int, arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command that runs this command line on `count` ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [*launcher, "-m", "holdfast", *arguments]


def run_local_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run this command line on `count` ranks of this machine; returns the exit code of torchrun."""
    if is_rank():
        raise InvalidArgument("--nproc starts ranks, but this process is already a rank; omit --nproc under torchrun")
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = local_ranks_command(count, arguments)
    # In a new session, so that the child receives a signal once, forwarded below, and not from the terminal as well.
    process = subprocess.Popen(command, env=environment | os.environ, start_new_session=True)  # noqa: S603  (our own command)
    with _forward_signals(process, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) as received:
        code = process.wait()
    return 128 + received[0] if received else code


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes], signals: Sequence[int]) -> Iterator[list[int]]:
    """Forward signals to a child process, which would otherwise outlive this one; yields the received signals."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pick_device(wanted: str) -> torch.device:
    """Return the device of this rank: its own GPU if available, unless "cpu" is requested."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("train.device=cuda: torch finds no GPU; set train.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Initialize the process group for the duration of a run; a single process needs none."""
    if not is_rank() or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    try:
        yield
    finally:
        dist.destroy_process_group()
