"""The ranks that share a conversion: those that torchrun started, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.ranks import Alone, Ranks

_DEADLINE_S = 6 * 3600.0  # a rank that is done waits for those with more to do


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """The ranks of the launcher's environment, for as long as the conversion takes."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield Alone()
        return
    from datetime import timedelta

    import torch.distributed as dist

    from holdfast.adapters.comm import current_ranks

    dist.init_process_group("gloo", timeout=timedelta(seconds=_DEADLINE_S))
    try:
        yield current_ranks(_DEADLINE_S)
    finally:
        dist.destroy_process_group()
