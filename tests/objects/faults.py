"""Faults of an object store at every request of a save or a load, and what must be true afterwards."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.adapters.comm import current_ranks
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError
from holdfast.engine.load import load_checkpoint
from holdfast.engine.options import LoadOptions
from holdfast.storage.objects.store import ObjectStorage
from tests.faults.row import HUNG, LOST, SURVIVED, WRONG, Tally
from tests.faults.world import JOBS, Allowed, Job, attempt, same, save, state, told
from tests.objects.proxy import Plan, Proxy
from tests.objects.server import BUCKET, Server

DEADLINE_S = 20.0  # of a job: many calls, each with retries
_OPTIONS = "deadline_s=4&timeout_s=1"
_BRIEF = "deadline_s=1&timeout_s=1"


@contextmanager
def environment(told: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Arena:
    """A server, and a proxy in front of it."""

    server: Server
    proxy: Proxy

    def storages(self, options: str = _OPTIONS) -> tuple[ObjectStorage, ObjectStorage]:
        """A root that was never written to: as it is, and behind the proxy."""
        address = f"s3://{BUCKET}/{secrets.token_hex(4)}/run?{options}"
        with environment(self.server.environment()):
            direct = ObjectStorage(address)
        with environment(self.server.environment(self.proxy.endpoint)):
            return direct, ObjectStorage(address)


@contextmanager
def arena(server: Server | None = None) -> Iterator[Arena]:
    """An arena on a server that is there, or on one of its own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-server-") as folder:
        made = server or Server(Path(folder))
        if server is None:
            made.start()
        proxy = Proxy(made.port)
        try:
            yield Arena(made, proxy)
        finally:
            proxy.close()
            if server is None:
                made.kill()


def load(storage: ObjectStorage, folder: str) -> dict[str, object]:
    fresh = state(0)
    options = LoadOptions()
    load_checkpoint(current_ranks(30.0), lambda: Checkpoint(storage, folder), fresh, options, deadline_s=30.0)
    return fresh


def judge(storage: ObjectStorage, allowed: Allowed, what: str, *, saves: bool) -> Tally:
    """Whether a root is as it must be, to every byte, and the next save works there; says why not."""
    found: dict[int, int] = {}
    for entry in committed_steps(storage):
        try:
            checkpoint = Checkpoint(storage, entry.folder)
            number = checkpoint.value("number")
            good = checkpoint.verify().good and same(load(storage, entry.folder), state(number))
        except HoldfastError as error:
            return told(WRONG, what, f"{entry.folder}: {error}")
        if not good:
            return told(WRONG, what, f"{entry.folder} is not what was saved")
        found[entry.step] = number
    for step, numbers in allowed.items():
        if found.get(step) not in numbers:
            return told(LOST, what, f"step {step} has {found.get(step)}, not one of {set(numbers)}")
    if saves:
        save(storage, 9, 9)
        return SURVIVED if same(load(storage, "step-000000000009"), state(9)) else LOST
    return SURVIVED


def save_with(here: Arena, fault: str, job: Job, number: int, count: int = 1, *, saves: bool = False) -> Tally | None:
    """A job with a fault at its `number`-th request; None if it has fewer."""
    what = f"{fault} at request {number}, {job.name}"
    direct, behind = here.storages(_OPTIONS if count == 1 else _BRIEF)
    save(direct, 1, 1)
    plan = here.proxy.set(Plan(fault, number, count))
    started = time.monotonic()
    acknowledged = attempt(lambda: job.work(behind), what)
    took = time.monotonic() - started
    here.proxy.set(Plan())
    if not plan.done:
        return None
    if took > DEADLINE_S:
        return told(HUNG, what, f"it took {took:.0f} s")
    if acknowledged is None:
        return WRONG
    if not acknowledged and count == 1 and fault != "drip":
        return told(WRONG, what, "one bad request of a store that works made a save fail")
    return judge(direct, job.after if acknowledged else job.meanwhile, what, saves=saves)


def load_with(here: Arena, fault: str, number: int) -> Tally | None:
    """A load with a fault at its `number`-th request: the right bytes, since the store answers the next time."""
    what = f"{fault} at request {number} of a load"
    direct, behind = here.storages()
    save(direct, 1, 1)
    plan = here.proxy.set(Plan(fault, number))
    started = time.monotonic()
    try:
        right = (
            same(load(behind, "step-000000000001"), state(1)) and Checkpoint(behind, "step-000000000001").verify().good
        )
    except HoldfastError as error:
        return told(WRONG, what, f"one bad request of a store that works made a load fail: {error}")
    finally:
        here.proxy.set(Plan())
    if not plan.done:
        return None
    if time.monotonic() - started > DEADLINE_S:
        return told(HUNG, what, "it took too long")
    return SURVIVED if right else told(WRONG, what, "other bytes were loaded")


NEW, AGAIN, REMOVED = (
    next(job for job in JOBS if job.name == name)
    for name in ("a new step", "a step again", "a new step, the old one removed")
)
