from __future__ import annotations

import threading

import pytest

from holdfast.storage.memory import MemoryStorage
from holdfast.testing.turns import Turns
from holdfast.testing.watched import WatchedStorage, watched


def count_up(storage: WatchedStorage, name: str) -> None:
    """A race: what is read before a turn is written after it."""
    for _ in range(3):
        number = int(storage.read(".a", name, 10))
        storage.note(".a", name, str(number + 1).encode())


def raced(seed: int) -> tuple[int, list[int]]:
    inner = MemoryStorage()
    inner.begin(".a")
    inner.note(".a", "n", b"0")
    turns = Turns(seed)
    storage = watched(inner, turns)
    assert turns.run([lambda: count_up(storage, "n")] * 2) == [None, None]
    return int(inner.read(".a", "n", 10)), turns.order


def test_a_seed_gives_the_same_order_again() -> None:
    assert [raced(seed) for seed in range(10)] == [raced(seed) for seed in range(10)]


def test_seeds_give_different_races() -> None:
    assert {number for number, _ in map(raced, range(30))} >= {3, 4, 5}


def test_what_a_thread_raises_is_handed_back() -> None:
    def fail() -> None:
        raise ValueError("no")

    results = Turns(1).run([fail, lambda: 5])
    assert isinstance(results[0], ValueError) and results[1] == 5


def test_a_thread_that_waits_for_ever_is_told_of() -> None:
    with pytest.raises(TimeoutError):
        Turns(1, deadline_s=0.2).run([threading.Event().wait])
