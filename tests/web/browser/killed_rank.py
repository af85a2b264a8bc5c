"""A save in flight of two real ranks: rank 1's writer is stopped in the middle of it, and its trainer is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.harness import Victims, tell_parent


@dataclass
class KilledRank:
    """The writer of the rank that was killed, which goes on when it is told to."""

    writer: int

    def go_on(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.writer, signal.SIGCONT)


def save_and_stop(root: str) -> None:
    """On a rank: save step 1, start to save step 2 with a stopped writer on rank 1, and train on until killed."""
    import torch
    import torch.distributed as dist

    import holdfast

    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16)
    checkpointer.save(1, {"w": {"big": torch.full((1 << 20,), 1.0)}}).result(60)
    writer: Any = checkpointer._engine.background.writer
    if dist.get_rank() == 1:
        os.kill(writer.pid, signal.SIGSTOP)
    checkpointer.save(2, {"w": {"big": torch.full((1 << 20,), 2.0)}})
    tell_parent(writer.pid)
    time.sleep(600)


@contextmanager
def killed_rank(root: Path) -> Iterator[KilledRank]:
    """Yield while the save of step 2 is in flight and rank 1's trainer is dead."""
    victims = Victims(2, save_and_stop, str(root))
    killed = KilledRank(0)
    try:
        killed.writer = victims.hear()[1]
        trainer = victims.processes[1].pid
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)
        yield killed
    finally:
        if killed.writer:
            killed.go_on()
        victims.kill()
