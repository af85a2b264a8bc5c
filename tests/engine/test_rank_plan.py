"""Rank plans: the same plan on every rank, each byte captured and written once, an arena that is large enough."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.core.ranks import SingleProcess
from holdfast.engine.options import SaveOptions
from holdfast.engine.rank_plan import RankPlan, forecast_arena_bytes, plan_rank
from holdfast.engine.survey import Surveyor
from tests.engine.ranks import ThreadRanks, on_ranks

SMALL = SaveOptions(block_bytes=4096)


def planned(ranks: Any, state: dict[str, Any], options: SaveOptions = SMALL) -> RankPlan:
    return plan_rank(ranks, Surveyor(options).survey(ranks, state, "here"), options)


def test_a_single_process_captures_and_writes_everything() -> None:
    plan = planned(SingleProcess(), {"model": nn.Linear(30, 20), "w": torch.ones(7)})
    assert plan.neighbors == (0,)
    assert plan.captured_bytes == (30 * 20 + 20 + 7) * 4
    assert plan.arena_bytes >= plan.captured_bytes
    assert plan.job.bytes == plan.total_bytes > plan.captured_bytes, "headers are written, too"
    ends = [source.span.offset + source.span.bytes for source in plan.sources]
    assert max(ends) <= plan.arena_bytes
    assert all(begin.span.offset >= end for begin, end in zip(plan.sources[1:], ends, strict=False)), "no overlap"


def test_ranks_share_the_writing_of_replicas() -> None:
    plans = on_ranks(2, lambda ranks: planned(ranks, {"w": torch.ones(10_000), "v": torch.ones(10_000)}))
    first, second = plans
    assert first.digest == second.digest
    assert first.commit is not None and second.commit is None
    assert first.neighbors == second.neighbors == (0, 1)
    assert first.job.bytes + second.job.bytes == first.total_bytes
    assert min(first.job.bytes, second.job.bytes) > first.total_bytes // 4, "both have a share"


def test_hosts_have_their_own_neighbors() -> None:
    def plan(ranks: ThreadRanks) -> tuple[int, ...]:
        return planned(ranks, {"w": torch.ones(10)}).neighbors

    assert on_ranks(3, plan, hosts=["a", "b", "a"]) == [(0, 2), (1,), (0, 2)]


def test_the_digest_tells_plans_apart() -> None:
    state = {"w": torch.ones(10)}
    base = planned(SingleProcess(), state)
    assert planned(SingleProcess(), {"w": torch.ones(10)}).digest == base.digest
    assert planned(SingleProcess(), {"w": torch.ones(11)}).digest != base.digest
    assert planned(SingleProcess(), state, SaveOptions(block_bytes=8192)).digest != base.digest
    assert planned(SingleProcess(), state, SaveOptions(block_bytes=4096, whole_files=True)).digest != base.digest


def test_the_signature_changes_with_the_tensors() -> None:
    state = {"model": nn.Linear(3, 2)}
    plan = planned(SingleProcess(), state)
    assert planned(SingleProcess(), state).signature == plan.signature
    assert planned(SingleProcess(), {"model": nn.Linear(3, 4)}).signature != plan.signature


def test_the_forecast_has_room_for_the_state_of_optimizers() -> None:
    model = nn.Linear(100, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    layout = Surveyor(SMALL).survey_layout(SingleProcess(), state, "here")
    forecast = forecast_arena_bytes(SingleProcess(), layout, SMALL)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    needed = planned(SingleProcess(), state).arena_bytes
    assert needed > 3 * 100 * 50 * 4, "two moments for each weight"
    assert needed <= forecast <= 2 * needed
