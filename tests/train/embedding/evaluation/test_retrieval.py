"""Retrieval beside a plain implementation, with ties and grades, and whatever the tiles. Ranks: tests/dist."""

from __future__ import annotations

import math

import pytest
import torch

import holdfast
from holdfast.train.embedding.evaluation import RetrievalSet, evaluate_retrieval
from holdfast.train.embedding.evaluation.top_documents import TopDocuments
from tests.train.embedding.evaluation.words import Words, retrieval


def plain(held_out, encode, at, similarity="cosine"):
    """The measures by their definitions, one query at a time."""
    sums: dict[str, float] = {}
    documents = [encode([text], "document")[0].detach() for text in held_out.documents]
    for text, relevant in zip(held_out.queries, held_out.relevant, strict=True):
        query = encode([text], "query")[0].detach()
        scores = [float(query @ document) for document in documents]
        if similarity == "cosine":
            scores = [s / float(query.norm()) / float(d.norm()) for s, d in zip(scores, documents, strict=True)]
        ranked = sorted(range(len(scores)), key=lambda number: (-round(scores[number], 5), number))
        gains = [relevant.get(number, 0) for number in ranked]
        ideal = sorted(gains, reverse=True)
        found = {
            "ndcg@10": sum(g / math.log2(i + 2) for i, g in enumerate(gains[:10]))
            / sum(g / math.log2(i + 2) for i, g in enumerate(ideal[:10])),
            "mrr@10": next((1 / (i + 1) for i, g in enumerate(gains[:10]) if g), 0.0),
            **{f"recall@{k}": sum(g > 0 for g in gains[:k]) / len(relevant) for k in at},
        }
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value / len(held_out.queries)
    return sums


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("graded", [False, True], ids=["binary", "graded"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_the_measures(seed: int, graded: bool, similarity):
    held_out, encode = retrieval(seed, graded=graded), Words(seed).encode
    found = evaluate_retrieval(held_out, encode, batch=5, recall_at=(1, 3, 100), similarity=similarity, tile=8)
    assert found == pytest.approx(plain(held_out, encode, (1, 3, 100), similarity), abs=1e-9)
    assert 0.01 < found["mrr@10"] < 1


@pytest.mark.parametrize("tile", [1, 2, 7, 56, 1000])
@pytest.mark.parametrize("batch", [1, 9, 100])
def test_equal_scores_are_ranked_by_document(tile: int, batch: int):
    """Products of small integers are exact and often equal: the order among them decides the measures."""
    held_out, encode = retrieval(4), Words(4, integers=True).encode
    found = evaluate_retrieval(held_out, encode, batch=batch, recall_at=(1, 2, 5), similarity="dot", tile=tile)
    assert found == pytest.approx(plain(held_out, encode, (1, 2, 5), "dot"), abs=1e-12)
    turned = RetrievalSet(
        held_out.queries,
        held_out.documents[::-1],
        [{len(held_out.documents) - 1 - number: 1.0 for number in each} for each in held_out.relevant],
    )
    assert evaluate_retrieval(turned, encode, recall_at=(1, 2, 5), similarity="dot") != found


def test_the_matrix_of_scores_is_never_whole(monkeypatch: pytest.MonkeyPatch):
    """Tiles of 10 by 10, and two tiles' best at once while they are merged, for 200 queries and 300 documents."""
    shapes = []
    best = TopDocuments._best

    def noted(top, scores, documents):
        shapes.append(tuple(scores.shape))
        return best(top, scores, documents)

    monkeypatch.setattr(TopDocuments, "_best", noted)
    held_out = retrieval(queries=200, documents=300)
    evaluate_retrieval(held_out, Words().encode, recall_at=[1], batch=300, tile=10)
    assert set(shapes) == {(10, 10)}
    assert len(shapes) == 20 * 30


def test_a_model_that_finds_all_alike_gains_nothing():
    """All scores are equal: the first documents are found, and no relevant one comes before them."""
    held_out = RetrievalSet(["1"] * 3, ["2"] * 40, [{39: 1.0}, {5: 1.0}, {20: 1.0, 1: 1.0}])
    found = evaluate_retrieval(held_out, lambda texts, _: torch.ones(len(texts), 2), recall_at=[10])
    assert found["mrr@10"] == pytest.approx((0 + 1 / 6 + 1 / 2) / 3)
    assert found["recall@10"] == pytest.approx((0 + 1 + 1 / 2) / 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("of", ["query", "document"])
def test_embeddings_that_are_not_finite_give_nan(bad: float, of: str):
    held_out, words = retrieval(), Words().encode

    def encode(texts, side):
        found = words(texts).detach().clone()
        if side == of and held_out.documents[-1] in (*texts, held_out.documents[-1] if of == "query" else ""):
            found[-1, 0] = bad
        return found

    # Ten documents are kept of 57: one that is lost among them would leave the measures finite.
    found = evaluate_retrieval(held_out, encode, recall_at=[10], batch=7, tile=10)
    assert all(math.isnan(value) for value in found.values())


def test_sides_and_half_precision():
    held_out, words = retrieval(), Words().encode
    asked = {"query": 0, "document": 0}

    def encode(texts, side):
        asked[side] += len(texts)
        return words(texts).bfloat16()

    found = evaluate_retrieval(held_out, encode, recall_at=[10])
    assert asked == {"query": 13, "document": 57}
    assert found["recall@10"] == pytest.approx(evaluate_retrieval(held_out, words)["recall@10"], abs=0.1)


def test_arguments_that_make_no_sense():
    held_out = retrieval()
    for wrong in ({"recall_at": []}, {"recall_at": [0]}, {"batch": 0}, {"tile": 0}, {"similarity": "l2"}):
        with pytest.raises(holdfast.InvalidArgument):
            evaluate_retrieval(held_out, Words().encode, **wrong)
    with pytest.raises(holdfast.InvalidArgument, match="for 13 texts"):
        evaluate_retrieval(held_out, lambda texts, _: torch.ones(len(texts)))
