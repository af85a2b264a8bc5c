"""Shared by commands that torchrun starts on several ranks: one rank prints an error, the others exit after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from holdfast.core.errors import Damaged, HoldfastError

_EXIT_DELAY_S = 1.0


@contextmanager
def report_on_first_rank(rank: int) -> Iterator[None]:
    """Report an error of all ranks on the first rank only.

    The other ranks exit a little later, because a launcher stops all ranks once one exits.
    """
    try:
        yield
    except HoldfastError as error:
        if rank == 0:
            raise
        time.sleep(_EXIT_DELAY_S)
        raise click.exceptions.Exit(1 if isinstance(error, Damaged) else 2) from None
