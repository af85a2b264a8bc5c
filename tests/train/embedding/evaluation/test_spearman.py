"""Spearman's correlation beside its definition, with ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from holdfast.train.embedding.evaluation import SimilaritySet, evaluate_similarity
from holdfast.train.embedding.evaluation.spearman import spearman
from tests.train.embedding.evaluation.words import Words, sentence


def plain(left, right) -> float:
    """Pearson's correlation of ranks; the rank of a value is the mean of the places that its equals take."""

    def ranks(values):
        return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]

    first, second = ranks(left), ranks(right)
    means = sum(first) / len(first), sum(second) / len(second)
    cov = sum((a - means[0]) * (b - means[1]) for a, b in zip(first, second, strict=True))
    return cov / math.sqrt(sum((a - means[0]) ** 2 for a in first) * sum((b - means[1]) ** 2 for b in second))


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_with_ties(values: int, seed: int):
    draw = np.random.default_rng(seed)
    left, right = (draw.integers(values, size=40).astype(float) for _ in range(2))
    assert spearman(left, right) == pytest.approx(plain(left.tolist(), right.tolist()), abs=1e-12)


def test_order_is_all_that_counts():
    values = np.random.default_rng(0).standard_normal(20)
    assert spearman(values, np.exp(values) + 3) == pytest.approx(1)
    assert spearman(values, -(values**3)) == pytest.approx(-1)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("batch", [1, 7, 100])
def test_a_model(batch: int, similarity):
    draw = np.random.default_rng(1)
    left, right = ([sentence(draw) for _ in range(30)] for _ in range(2))
    labels = draw.integers(6, size=30).tolist()
    words = Words().encode
    found = evaluate_similarity(SimilaritySet(left, right, labels), words, batch=batch, similarity=similarity)
    pairs = [(words([a])[0], words([b])[0]) for a, b in zip(left, right, strict=True)]
    scores = [(torch.cosine_similarity(a, b, dim=0) if similarity == "cosine" else a @ b).item() for a, b in pairs]
    assert found == {"spearman": pytest.approx(plain(scores, labels), abs=1e-9)}


def test_what_has_no_correlation_is_nan():
    pairs = SimilaritySet(["1", "2", "3"], ["4", "5", "6"], [1.0, 2.0, 2.0])
    assert math.isnan(evaluate_similarity(pairs, lambda texts, _: torch.ones(len(texts), 2))["spearman"])
    assert math.isnan(evaluate_similarity(pairs, lambda texts, _: torch.full((len(texts), 2), math.nan))["spearman"])
    assert math.isnan(spearman(np.arange(3.0), np.zeros(3)))
