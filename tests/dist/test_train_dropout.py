"""With dropout on, every layout trains the same model, and a run goes on elsewhere as if it had not moved."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.train.config import RunConfig
from holdfast.train.layout import Layout
from holdfast.train.loop import Trainer
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.resume_cases import config, losses
from tests.dist.train_cases import LAYOUTS, assemble, batches, keyed, model, pieces, share

pytestmark = pytest.mark.sliced(40)

# First the layout that cuts sequences, heads and layers: `make test` runs it alone.
ORDER = sorted(LAYOUTS, key=lambda name: name != "pp-2-tp-2")
CONFIG = model("qwen3_moe", attention_dropout=0.2, residual_dropout=0.1, embedding_dropout=0.3)
MICRO_BATCHES = 4
DEADLINE_S = 200.0


def _step(layout: Layout, recompute: bool) -> Any:
    replica = build(CONFIG, layout, recompute=recompute)
    sums = replica.forward_backward(share(replica, keyed(batches(MICRO_BATCHES))))
    return pieces({key: p.grad for key, p in replica.parameters().items()}), sums.total


def _both(layout: Layout) -> list[Any]:
    return [_step(layout, recompute) for recompute in (False, True)]


@functools.cache
def _alone() -> tuple[dict[str, torch.Tensor], float]:
    gradients, total = _step(Layout(), recompute=False)
    return assemble([gradients]), total


@pytest.mark.full
@pytest.mark.parametrize("layout", ORDER)
def test_layout_drops_what_one_process_drops(layout: str) -> None:
    """The balancing loss is of the routers, so that they too see what one process shows them."""
    truth, total = _alone()
    found = run_ranks(LAYOUTS[layout].world, _both, LAYOUTS[layout], deadline_s=DEADLINE_S)
    for option in range(2):
        gradients = assemble([rank[option][0] for rank in found])
        for key, value in truth.items():
            assert float((gradients[key] - value).norm() / value.norm()) < 1e-5, key
        assert [rank[option][1] for rank in found] == pytest.approx([total] * len(found), rel=1e-5)


def _train(settings: RunConfig) -> int:
    return Trainer(settings).run().resumed_from


@pytest.mark.timeout(300)
@pytest.mark.full
def test_a_run_with_dropout_goes_on_elsewhere(tmp_path: Path) -> None:
    """Three steps on two ranks, then three on one: the six steps of one rank alone."""
    options: dict[str, Any] = {"sparse": True, "train__micro_batch": 1}
    whole = config(tmp_path / "whole", {}, dropout=True, train__steps=6, **options)
    run_ranks(1, _train, whole, deadline_s=DEADLINE_S)
    spread = config(tmp_path / "moved", {"dp_shard": 2}, dropout=True, train__steps=3, schedule__steps=6, **options)
    run_ranks(2, _train, spread, deadline_s=DEADLINE_S)
    moved = config(tmp_path / "moved", {}, dropout=True, train__steps=6, **options)
    assert run_ranks(1, _train, moved, deadline_s=DEADLINE_S) == [3]
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "moved") == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 6
