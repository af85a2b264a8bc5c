"""The ranks that share a conversion: those that torchrun started, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import Ranks, SingleProcess

_DEADLINE_S = 6 * 3600.0  # a rank that is done waits for those with more to do


def launched_place() -> tuple[int, int]:
    """This process's rank and the number of ranks, by the launcher's environment; raises InvalidArgument."""
    world = _number("WORLD_SIZE", 1)
    return (_number("RANK", 0), world) if world > 1 else (0, 1)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgument(f"the environment says {name}={text!r}, which is no number; unset it, or use torchrun")
    return int(text)


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """The ranks of the launcher's environment, for as long as the conversion takes."""
    if launched_place()[1] <= 1:
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
