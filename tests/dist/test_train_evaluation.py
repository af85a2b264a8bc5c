"""Evaluation is the same on every layout, also where the samples do not fill the last round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.train.data.feed import Feed
from holdfast.train.loop import Trainer
from tests.dist.harness import run_ranks
from tests.dist.resume_cases import config

pytestmark = pytest.mark.full

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-2": (2, {"dp_shard": 2}),
    "tp-2-pp-2": (4, {"tp": 2, "pp": 2}),
    "ep-2": (2, {"dp_shard": 2, "ep": 2}),
    "pp-2-interleaved": (2, {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2}),
}


def _evaluate(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    settings = config(folder, layout, sparse=True, dropout=True, train__micro_batch=1, data__evaluation_samples=11)
    trainer = Trainer(settings)
    trainer._feed = _Counting(trainer._feed)
    sums = trainer.evaluate()
    assert sums is not None
    trainer.step(1)
    trainer.metrics.close()
    return {"loss": sums.loss, "tokens": sums.tokens, "reads": trainer._feed.read, "may": trainer._feed.reads}


class _Counting(Feed):
    """Counts what one rank reads of the data."""

    def __init__(self, feed: Feed) -> None:
        self.__dict__.update(feed.__dict__)
        self.read = 0

    def _read(self, shares: Any) -> Any:
        self.read += sum(len(share) for share in shares)
        return super()._read(shares)


@pytest.mark.timeout(400)
def test_evaluation_is_the_same_and_only_ranks_that_need_data_read_it(tmp_path: Path):
    """The 11 samples are two rounds of 8; in a step of 8 samples, each is read once per stage that needs it."""
    alone = run_ranks(1, _evaluate, str(tmp_path / "one"), {}, deadline_s=180)[0]
    assert (alone["tokens"], alone["reads"]) == (88, 8)
    for name, (world, layout) in LAYOUTS.items():
        ranks = run_ranks(world, _evaluate, str(tmp_path / name), layout, deadline_s=180)
        assert [rank["loss"] for rank in ranks] == pytest.approx([alone["loss"]] * world, rel=1e-5), name
        assert {rank["tokens"] for rank in ranks} == {88}
        stages = min(2, layout.get("pp", 1))
        assert sum(rank["reads"] for rank in ranks) == 8 * stages
        assert [rank["reads"] > 0 for rank in ranks] == [rank["may"] for rank in ranks]
        assert sum(rank["may"] for rank in ranks) == layout.get("dp_shard", 1) * stages
