"""Real ranks for tests: processes with a gloo group, a deadline, and their results or tracebacks."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

DEADLINE_S = 120.0

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"),
        *(
            "holdfast.checkpointer",
            "holdfast.engine.background_save",
            "holdfast.adapters.optimizer",
            "holdfast.capture.capturer",
        ),
        "holdfast.train.parallel.parallel_model",
    ]
)


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def tell_parent(value: Any) -> None:
    """On a rank: send the parent a word while the function still runs."""
    _SENDER[0].send((True, value))


_SENDER: list[Any] = []


class Victims:
    """Ranks that are watched while they run, and killed."""

    def __init__(self, world: int, function: Callable[..., Any], *arguments: Any, hosts: list[str] | None = None):
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-ranks-")
        self._pipes, self.processes = _start(world, self._folder.name, hosts, function, arguments)

    def hear(self, deadline_s: float = DEADLINE_S) -> list[Any]:
        """The next word of every rank; raises RankFailed if one failed."""
        return _collect(self._pipes, time.monotonic() + deadline_s, deadline_s)

    def hear_one(self, rank: int, deadline_s: float) -> tuple[bool, Any]:
        """The next word of one rank, and whether it is one: not a traceback, not its death."""
        receiver, _ = self._pipes[rank]
        if not receiver.poll(deadline_s):
            raise RankFailed(f"rank {rank} did not answer within {deadline_s:.1f} s")
        try:
            good, value = receiver.recv()
        except EOFError:
            return False, "the process died without a word"
        return good, value

    def signal(self, number: int) -> None:
        for process in self.processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it has died before
                os.kill(process.pid, number)

    def end(self, deadline_s: float = 20.0) -> list[int | None]:
        """Wait for all to be gone; their exit codes."""
        for process in self.processes:
            process.join(deadline_s)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.end()


def _start(
    world: int, folder: str, hosts: list[str] | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[list[Any], list[Any]]:
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (_, sender) in enumerate(pipes):
        host = hosts[rank] if hosts else None
        process = CONTEXT.Process(
            target=_rank_main,
            args=(rank, world, folder, host, sender, _environment(), function, arguments),
            daemon=True,
        )
        process.start()
        sender.close()
        processes.append(process)
    return pipes, processes


def _environment() -> dict[str, str]:
    """What ranks must know of this process's environment: the server that they fork from is older."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = DEADLINE_S,
    hosts: list[str] | None = None,
) -> list[Any]:
    """Call `function(*arguments)` on `world` ranks; returns what each returned, in rank order."""
    with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as folder:
        pipes, processes = _start(world, folder, hosts, function, arguments)
        try:
            return _collect(pipes, time.monotonic() + deadline_s, deadline_s)
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Any], end: float, deadline_s: float) -> list[Any]:
    results: list[Any] = []
    failures = []
    for rank, (receiver, _) in enumerate(pipes):
        if not receiver.poll(max(0.0, end - time.monotonic())):
            raise RankFailed(f"rank {rank} did not answer within {deadline_s} s\n" + "\n".join(failures))
        try:
            good, value = receiver.recv()
        except EOFError:
            good, value = False, "the process died without a word"
        if not good:
            failures.append(f"rank {rank}:\n{value}")
        results.append(value)
    if failures:
        raise RankFailed("\n".join(failures))
    return results


def _rank_main(
    rank: int,
    world: int,
    folder: str,
    host: str | None,
    sender: Any,
    environment: dict[str, str],
    function: Any,
    arguments: Any,
) -> None:
    warnings.simplefilter("ignore")
    faulthandler.enable()  # a rank that dies in native code says where
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if host is not None:
        os.environ["HOLDFAST_HOST"] = host
    _SENDER[:] = [sender]
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        value = function(*arguments)
        dist.barrier()
        sender.send((True, value))
    except BaseException:  # noqa: BLE001  (the test must see it)
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()
