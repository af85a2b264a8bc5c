"""Evaluation counts every sample once, however few there are in the last round. On more ranks: tests/dist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.train.batch import derive_batches
from holdfast.train.data.datasets import open_datasets
from holdfast.train.evaluation import evaluation_shares
from holdfast.train.loop import Trainer
from holdfast.train.loss import MicroBatch
from tests.dist.resume_cases import config


def test_evaluation_counts_every_sample_once(tmp_path: Path):
    """Seven samples in rounds of eight, of four and of three: the last round is never full."""
    found = []
    for batch in (8, 4, 3):
        settings = config(tmp_path, {}, train__global_batch=batch, train__micro_batch=1, data__evaluation_samples=7)
        trainer = Trainer(settings)
        sums = trainer.evaluate()
        assert sums is not None
        assert sums.tokens == 7 * 8
        found.append(sums.loss)
    _, dataset = open_datasets(settings.data, 32)
    assert dataset is not None
    rows = torch.from_numpy(dataset.read(np.arange(7)))
    together = trainer.replica.evaluate([MicroBatch(rows[:, :-1], rows[:, 1:])])
    assert found == pytest.approx([together.loss] * 3, rel=1e-6)
    assert Trainer(config(tmp_path, {}, data__evaluation_samples=0)).evaluate() is None


def test_what_fills_up_a_batch_counts_in_no_loss(tmp_path: Path):
    """Nor in the balance of experts: seven sequences, whatever the rounds are."""
    found = []
    for batch in (8, 7, 3):
        sets: dict[str, Any] = {"train__global_batch": batch, "train__micro_batch": 1, "data__evaluation_samples": 7}
        sums = Trainer(config(tmp_path, {}, sparse=True, **sets)).evaluate()
        assert sums is not None
        assert (sums.tokens, sums.sequences) == (7 * 8, 7)
        found.append(sums.total)
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_shares_of_an_evaluation_cover_it():
    batches = derive_batches(global_batch=12, micro_batch=2, data_parallel=3)
    rounds = [list(evaluation_shares(31, batches, rank)) for rank in range(3)]
    flat = [int(index) for rank in rounds for shares in rank for share in shares for index in share]
    assert sorted(index for index in flat if index >= 0) == list(range(31))
    assert {len(share) for rank in rounds for shares in rank for share in shares} == {2}
    assert [len(rank) for rank in rounds] == [3, 3, 3]
