"""How a process becomes a rank: under torchrun, alone, or as the parent of local ranks."""

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
    """Whether torchrun, or something like it, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_ranks_command(count: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs this command line on `count` ranks of this machine, by torchrun itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [*launcher, "-m", "holdfast", *arguments]


def run_local_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run this command line on `count` ranks of this machine; returns the exit code of torchrun."""
    if is_rank():
        raise InvalidArgument("--nproc starts ranks, and this process is one already: leave it to torchrun")
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = local_ranks_command(count, arguments)
    # In a session of its own: what ends this process is passed on below, once, and not by the terminal too.
    process = subprocess.Popen(command, env=environment | os.environ, start_new_session=True)  # noqa: S603  (our own words)
    with _passed_on(process, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) as came:
        code = process.wait()
    return 128 + came[0] if came else code


@contextmanager
def _passed_on(process: subprocess.Popen[bytes], signals: Sequence[int]) -> Iterator[list[int]]:
    """Within, signals to this process go to another, which would live on without it; those that came are listed."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pick_device(wanted: str) -> torch.device:
    """The device of this rank: a GPU of its own if there are any and none was ruled out."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("train.device=cuda: torch finds no GPU here; set train.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The ranks' process group for as long as the run lasts; none for a process on its own."""
    if not is_rank() or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    try:
        yield
    finally:
        dist.destroy_process_group()
