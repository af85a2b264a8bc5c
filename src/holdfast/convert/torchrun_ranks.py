"""The ranks that share a conversion: those of torchrun's environment with a process group, or a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import Ranks, SingleProcess

_DEADLINE_S = 6 * 3600.0  # a finished rank waits for the others


def launched_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks from the launcher's environment.

    Raises InvalidArgument for variables that are not numbers.
    """
    world = _number("WORLD_SIZE", 1)
    return (_number("RANK", 0), world) if world > 1 else (0, 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgument(f"the environment variable {name}={text!r} is not a number; unset it, or use torchrun")
    return int(text)


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Yield the ranks of the launcher's environment, with a process group if there are several."""
    if launched_rank()[1] <= 1:
        yield SingleProcess()
        return
    from datetime import timedelta

    import torch.distributed as dist

    from holdfast.adapters.comm import current_ranks

    dist.init_process_group("gloo", timeout=timedelta(seconds=_DEADLINE_S))
    try:
        yield current_ranks(_DEADLINE_S)
    finally:
        dist.destroy_process_group()
