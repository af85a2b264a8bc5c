"""Checks that the ranks of a batch make together: what one of them refuses, none begins to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument, PeerFailed

_T = TypeVar("_T")


def agreed(prepare: Callable[[], _T], columns: int, group: dist.ProcessGroup | None, device: torch.device) -> _T:
    """Return what `prepare` returns, or raise its error; PeerFailed if it fails on another rank. Collective.

    Raises InvalidArgument if the ranks have different numbers of columns, which would pair other tensors.
    """
    if group is None:
        return prepare()
    failure: Exception | None = None
    try:
        prepared = prepare()
    except Exception as error:  # noqa: BLE001  (the other ranks are waiting for this one)
        failure = error
    counts = torch.tensor([failure is not None, columns, -columns], dtype=torch.int64, device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
    failed, most, least = counts.tolist()
    if failure is not None:
        raise failure
    if failed:
        raise PeerFailed("another rank cannot use its rows of this batch: see the error that it raised")
    if most != -least:
        raise InvalidArgument(f"this rank has {columns} columns, and the ranks have {-least} to {most}: give as many")
    return prepared
