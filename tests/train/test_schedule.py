"""Schedules meet their corners, agree with torch's own between them, and are pure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import holdfast
from holdfast.train.schedule import ScheduleConfig, learning_rate_share


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_corners(kind: str):
    config = ScheduleConfig(kind, warmup_steps=10, floor=0.2)
    rates = [learning_rate_share(config, step, 100) for step in range(1, 131)]
    assert rates[0] == 0.1
    assert rates[9] == 1.0
    assert rates[99] == pytest.approx(0.2)
    assert set(rates[99:]) == {rates[99]}
    assert all(a < b for a, b in itertools.pairwise(rates[:10]))
    assert all(a > b for a, b in itertools.pairwise(rates[9:100]))


def test_constant_stays():
    config = ScheduleConfig("constant", warmup_steps=4)
    assert [learning_rate_share(config, step, 6) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def _torch_rates(make: type, steps: int, **options: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_as_torch_has_them():
    cosine = [learning_rate_share(ScheduleConfig("cosine", floor=0.1), step, 51) for step in range(1, 52)]
    assert cosine == pytest.approx(
        _torch_rates(torch.optim.lr_scheduler.CosineAnnealingLR, 51, T_max=50, eta_min=0.1), rel=1e-9
    )
    linear = [learning_rate_share(ScheduleConfig("linear", floor=0.3), step, 41) for step in range(1, 60)]
    options = {"start_factor": 1.0, "end_factor": 0.3, "total_iters": 40}
    assert linear == pytest.approx(_torch_rates(torch.optim.lr_scheduler.LinearLR, 59, **options), rel=1e-9)


def test_the_end_may_be_given_and_one_step_is_enough():
    assert learning_rate_share(ScheduleConfig("linear", steps=11, floor=0), 6, 100) == pytest.approx(0.5)
    assert learning_rate_share(ScheduleConfig("linear", floor=0.5), 1, 1) == 0.5
    warming = [learning_rate_share(ScheduleConfig("cosine", warmup_steps=5), step, 5) for step in range(1, 7)]
    assert warming == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.1]), "a warm-up ends at the peak, also as the last step"


@pytest.mark.parametrize("wrong", [{"kind": "step"}, {"floor": 1.5}, {"warmup_steps": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]):
    with pytest.raises(holdfast.InvalidArgument):
        ScheduleConfig(**wrong)


def test_there_is_no_step_before_the_first():
    with pytest.raises(holdfast.InvalidArgument):
        learning_rate_share(ScheduleConfig(), 0, 10)
