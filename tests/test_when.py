"""When a step is saved: multiples, times, signals, and the interval that loses the least."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import when
from holdfast.core.ranks import SingleProcess
from holdfast.engine.save_handle import SaveHandle
from holdfast.when import Schedule, best_interval_s

NO_CHECKPOINT: Any = None  # a schedule looks at the time of a save only


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Two(SingleProcess):
    """Two ranks of which this is one; counts how often they talk."""

    world = 2

    def __init__(self, other: list[int] | None = None) -> None:
        self.talks = 0
        self.other = other

    def all_max(self, values):
        self.talks += 1
        return list(map(max, values, self.other)) if self.other else list(values)


def saved_steps(occasion: when.Occasion, count: int, step_s: float, ranks=None, stall_ms=0.0, seconds=0.0) -> list[int]:
    clock = Clock()
    schedule = Schedule(occasion, clock)
    found = []
    for step in range(1, count + 1):
        clock.now += step_s
        if schedule.is_due(ranks or SingleProcess(), step):
            handle = SaveHandle(step, 60.0)
            handle.stall_ms, handle.seconds = stall_ms, seconds
            handle.succeed(lambda: NO_CHECKPOINT)
            schedule.saved(handle)
            found.append(step)
    return found


def test_every_n_steps() -> None:
    assert saved_steps(when.steps(4), 13, 1.0) == [4, 8, 12]
    assert saved_steps(when.steps(4) | when.steps(6), 13, 1.0) == [4, 6, 8, 12]


def test_multiples_of_steps_need_no_word_between_ranks() -> None:
    ranks = Two()
    saved_steps(when.steps(4), 100, 1.0, ranks)
    assert ranks.talks == 0


@pytest.mark.parametrize("ranks", [None, Two()])
def test_every_t_seconds(ranks) -> None:
    assert saved_steps(when.seconds(10), 45, 1.0, ranks) == [10, 20, 30, 40]
    assert saved_steps(when.seconds("1m"), 130, 1.0, ranks) == [60, 120]


def test_a_save_for_another_reason_starts_the_time_anew() -> None:
    assert saved_steps(when.seconds(10) | when.steps(7), 30, 1.0) == [7, 14, 21, 28]


def test_ranks_talk_seldom_about_times_and_once_a_second_about_signals() -> None:
    rare, often = Two(), Two()
    saved_steps(when.seconds(1000), 10_000, 0.1, rare)
    assert rare.talks < 150
    saved_steps(when.preempted(), 10_000, 0.1, often)
    assert 900 < often.talks < 1200


def test_a_slow_rank_is_what_counts() -> None:
    schedule = Schedule(when.seconds(10), Clock())
    assert schedule.is_due(Two([11_000_000, 0, 0, 0, 0, 0]), 1)


def test_the_interval_is_the_one_that_loses_the_least_time() -> None:
    """Against a simulation of a run that fails at random."""
    cost, failures = 5.0, 3600.0
    best = best_interval_s(cost, failures)

    def lost(interval: float) -> float:
        chance = random.Random(7)
        total = work = 0.0
        while work < 2e6:
            until = chance.expovariate(1 / failures)
            done = math.floor(until / (interval + cost))
            work += done * interval
            total += until
        return total / work

    times = {factor: lost(best * factor) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)}
    assert min(times, key=lambda factor: times[factor]) == 1.0
    assert best_interval_s(100.0, 10.0) == 10.0


def test_auto_goes_by_what_a_save_costs() -> None:
    occasion = when.auto(failures_per_day=24)
    first, second, *rest = saved_steps(occasion, 4000, 1.0, stall_ms=5000.0)
    expected = best_interval_s(5.0, 3600.0)
    assert first == 60 and second - first == math.ceil(expected) and len(rest) > 10
    cheap = saved_steps(occasion, 4000, 1.0, stall_ms=5.0)
    assert cheap[2] - cheap[1] < 10
    slow = saved_steps(occasion, 4000, 1.0, stall_ms=5.0, seconds=100.0)
    assert slow[2] - slow[1] == 120
    assert when.auto(mean_time_between_failures="1h") == occasion


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: when.steps(0),
        lambda: when.seconds(-1),
        lambda: when.seconds("often"),
        lambda: when.preempted("SIGNOTHING"),
        when.auto,
        lambda: when.auto(failures_per_day=0),
        lambda: when.auto(failures_per_day=1, mean_time_between_failures="1h"),
        lambda: holdfast.Checkpointer("x", when=5),  # type: ignore[arg-type]
        lambda: holdfast.Checkpointer("x").save_if_due(1, {}),
    ],
)
def test_what_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(holdfast.InvalidArgument):
        wrong()


def test_a_signal_saves_the_next_step_and_says_so(tmp_path: Path) -> None:
    heard = []
    default = signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("user"))
    try:
        with holdfast.Checkpointer(
            tmp_path, when=when.steps(100) | when.preempted("SIGTERM", "SIGUSR1")
        ) as checkpointer:
            state = {"x": torch.ones(2)}
            assert checkpointer.save_if_due(1, state) is None and not checkpointer.preempted
            os.kill(os.getpid(), signal.SIGTERM)
            handle = checkpointer.save_if_due(2, state)
            assert handle is not None and handle.done() and checkpointer.preempted
            assert checkpointer.save_if_due(3, state) is None
            os.kill(os.getpid(), signal.SIGUSR1)  # the second one does what it did before
            assert heard == ["user"]
        assert checkpointer.steps() == [2]
        assert signal.getsignal(signal.SIGTERM) == default
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_real_time_passes(tmp_path: Path) -> None:
    began = time.monotonic()
    deadline = began + 60
    with holdfast.Checkpointer(tmp_path, when=when.seconds(0.2)) as checkpointer:
        steps: list[int] = []
        for step in itertools.count(1):  # a slow writer puts the next save off by any number of steps
            if len(steps) == 3 or time.monotonic() > deadline:
                break
            time.sleep(0.02)
            asked = time.monotonic()
            if checkpointer.save_if_due(step, {"x": torch.ones(2)}) is not None:
                assert time.monotonic() - began >= 0.2
                began = asked
                steps.append(step)
        checkpointer.finish()
        assert len(steps) == 3 and checkpointer.steps() == steps


def test_echoes_of_a_signal_do_not_end_the_process_before_the_save(tmp_path: Path) -> None:
    one = holdfast.Checkpointer(tmp_path / "a", when=when.preempted(), on_busy="skip")
    two = holdfast.Checkpointer(tmp_path / "b", when=when.preempted())
    with one, two:
        state = {"x": torch.ones(2_000_000)}
        one.save(1, state)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        for checkpointer in (one, two):  # each hears it, and nothing is skipped for the save in flight
            handle = checkpointer.save_if_due(2, state)
            assert handle is not None and not handle.skipped and handle.result().step == 2


def test_going_back_in_steps_does_not_make_the_schedule_deaf() -> None:
    clock, ranks = Clock(), Two()
    schedule = Schedule(when.preempted(), clock)
    for step in range(1000, 1200):
        clock.now += 0.001
        schedule.is_due(ranks, step)
    schedule.accept_signal(int(signal.SIGTERM))
    assert schedule.is_due(ranks, 5)


def test_times_wait_for_the_save_in_flight() -> None:
    clock = Clock()
    schedule = Schedule(when.auto(failures_per_day=24), clock)
    handle = SaveHandle(1, 60.0)
    schedule.saved(handle)
    due = []
    for step in range(2, 400):
        clock.now += 1.0
        if step == 200:
            handle.stall_ms, handle.seconds = 1000.0, 198.0
            handle.succeed(lambda: NO_CHECKPOINT)
        if schedule.is_due(SingleProcess(), step):
            due.append(step)
            break
    assert due == [239]  # 1.2 times 198 seconds after the save began


def test_outside_of_the_main_thread_signals_are_said_not_to_be_heard(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.warns(holdfast.HoldfastWarning, match="main thread"):
        pool.submit(holdfast.Checkpointer, tmp_path, when=when.preempted()).result().close()
