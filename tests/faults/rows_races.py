"""Races under one root: two writers of a step, a writer and retention, a reader and retention.

First in turns that a seed decides, at every storage call and every file system call; then in
real processes, as fast as they can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.names import folder_step, step_folder
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.testing.system import watched_system
from holdfast.testing.turns import Turns
from holdfast.testing.watched import watched
from tests.faults.row import HUNG, WRONG, Row, Tally
from tests.faults.world import Allowed, Hung, in_children, judge, save, told, world

INTERLEAVINGS = 20
PROCESS_RUNS = 4
ROUNDS = 3
NEW = 20  # the first number of the second writer


class WrongBytes(AssertionError):
    """A reader got bytes that nobody saved."""


def write(step: int, number: int, storage: Storage) -> bool:
    save(storage, step, number)
    return True


def write_on(storage: Storage) -> bool:
    """A run that goes on: steps 2, 3, ..., each acknowledged before the next."""
    for step in range(2, 2 + ROUNDS):
        save(storage, step, step)
    return True


def retain(storage: Storage) -> bool:
    """Retention: again and again, remove every step but the newest."""
    for _ in range(2 * ROUNDS):
        steps = sorted(step for step in map(folder_step, storage.folders()) if step is not None)
        for step in steps[:-1]:
            try:
                storage.remove(step_folder(step))
            except NotFound:
                pass  # another one removed it
    return True


def replace_and_remove(storage: Storage) -> bool:
    """What can happen to a step that is being read: it is saved again, a newer one comes, it goes."""
    save(storage, 1, 7)
    save(storage, 2, 2)
    return storage.remove(step_folder(1)) in (True, False)


def read(storage: Storage) -> bool:
    """Read step 1 again and again: once it is held, it is read to the end, and it is one of the states saved."""
    for _ in range(2 * ROUNDS):
        with ExitStack() as stack:
            try:
                checkpoint = Checkpoint(storage, step_folder(1))
                stack.enter_context(checkpoint.held())
            except HoldfastError:
                continue  # it is being removed
            try:
                _check(checkpoint)
            except HoldfastError as error:
                raise WrongBytes(f"it was held, and yet {error!r}") from error
    return True


def _check(checkpoint: Checkpoint) -> None:
    number = checkpoint.value("number")
    found = {float(value) for key in ("a", "b") for value in checkpoint.read(key, "model").ravel()}
    if found != {float(number)} or number not in (1, 7):
        raise WrongBytes(f"number {number}, values {sorted(found)[:4]}")
    if not checkpoint.verify().good:
        raise WrongBytes("it was held, and yet part of it was gone")


Work = Callable[[Storage], bool]
After = Callable[[list[Any]], Allowed]


def after_two_writers(results: list[Any]) -> Allowed:
    acknowledged = [number for number, result in zip((2, NEW), results, strict=True) if result is True]
    return {1: frozenset({1}), 2: frozenset(acknowledged or {None})}


def after_retention(results: list[Any]) -> Allowed:
    return {1 + ROUNDS: frozenset({1 + ROUNDS} if results[0] is True else {1 + ROUNDS, None})}


def after_removal(results: list[Any]) -> Allowed:
    return {1: frozenset({1, 7, None}), 2: frozenset({2})}


RACES: dict[str, tuple[tuple[Work, ...], After]] = {
    "two writers of one step": ((partial(write, 2, 2), partial(write, 2, NEW)), after_two_writers),
    "a writer and retention": ((write_on, retain), after_retention),
    "two writers and retention": (
        (partial(write, 2, 2), partial(write, 2, NEW), retain),
        lambda results: after_two_writers(results[:2]) | {1: frozenset({1, None})},
    ),
    "a reader and retention": ((replace_and_remove, read), after_removal),
}


def in_turns(works: tuple[Work, ...], after: After, seed: int) -> Tally:
    total = Tally()
    with world() as here:
        for offset in range(INTERLEAVINGS):
            with here.root() as root:
                total += one_interleaving(root, works, after, seed + offset)
    return total


def one_interleaving(root: Path, works: tuple[Work, ...], after: After, seed: int) -> Tally:
    turns = Turns(seed)
    what = f"interleaving of seed {seed}"
    with watched_system(turns.watch):
        try:
            results = turns.run([partial(work, watched(LocalStorage(root), turns)) for work in works])
        except TimeoutError as error:
            return told(HUNG, what, str(error))
    strange = [result for result in results if not isinstance(result, bool | HoldfastError)]
    if strange:
        return told(WRONG, what, repr(strange[0]))
    return judge(root, after(results), what)


def in_processes(works: tuple[Work, ...], after: After, seed: int) -> Tally:
    """The same in a process each; whether each was acknowledged is what its fork says."""
    total = Tally()
    with world() as here:
        for number in range(PROCESS_RUNS):
            with here.root() as root:
                what = f"processes, run {number}"
                try:
                    ends = _race(root, works)
                except Hung:
                    total += told(HUNG, what, "a process did not end")
                    continue
                if any(code for _, code in ends):
                    total += told(WRONG, what, f"the processes ended with {ends}")
                else:
                    total += judge(root, after([done for done, _ in ends]), what)
    return total


def _race(root: Path, works: tuple[Work, ...]) -> list[tuple[bool, int]]:
    begin = time.time() + 0.05

    def start(work: Work) -> None:
        time.sleep(max(0.0, begin - time.time()))
        work(LocalStorage(root))

    return in_children([partial(start, work) for work in works])


ROWS = (
    *(Row(f"race in turns: {name}", partial(in_turns, *race)) for name, race in RACES.items()),
    *(Row(f"race of processes: {name}", partial(in_processes, *race)) for name, race in RACES.items()),
)
