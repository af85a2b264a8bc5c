"""Evaluation over ranks: each encodes its share, all call the encoder equally often and get one process's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast.train.embedding.evaluation import SimilaritySet, evaluate_retrieval, evaluate_similarity
from tests.dist.harness import run_ranks
from tests.train.embedding.evaluation.words import Words, retrieval, sentence


def _pairs() -> SimilaritySet:
    draw = np.random.default_rng(2)
    left, right = ([sentence(draw) for _ in range(9)] for _ in range(2))
    return SimilaritySet(left, right, draw.integers(3, size=9).tolist())


def _evaluate(kind: str, batch: int, bad: bool = False) -> Any:
    """Return the measures, and how many texts of this rank's were encoded; every call is a collective."""
    group = dist.group.WORLD if dist.is_initialized() else None
    words, texts = Words(1, integers=True), 0

    def encode(asked: list[str], side: str) -> torch.Tensor:
        nonlocal texts
        texts += len(asked)
        if group is not None:
            dist.all_reduce(torch.ones(1), group=group)
        found = words.encode(asked).detach()
        return found * float("nan") if bad and side == "document" and group is not None and group.rank() == 1 else found

    if kind == "similarity":
        return sorted(evaluate_similarity(_pairs(), encode, batch=batch, group=group).items()), texts
    found = evaluate_retrieval(
        retrieval(3), encode, batch=batch, similarity="dot", recall_at=(1, 10), group=group, tile=9
    )
    return sorted(found.items()), texts


@pytest.mark.sliced(4)
@pytest.mark.parametrize("batch", [2, 100])
@pytest.mark.parametrize("kind", ["retrieval", "similarity"])
def test_ranks_have_the_numbers_of_one_process(kind: str, batch: int) -> None:
    truth, whole = _evaluate(kind, batch)
    found = run_ranks(3, _evaluate, kind, batch)
    assert [measures for measures, _ in found] == [truth] * 3
    if batch == 2:
        assert max(texts for _, texts in found) < whole / 2, "the work was shared"


def test_an_embedding_that_is_not_finite_on_one_rank_is_nan_on_all() -> None:
    for measures, _ in run_ranks(2, _evaluate, "retrieval", 13, True):
        assert all(value != value for _, value in measures)
