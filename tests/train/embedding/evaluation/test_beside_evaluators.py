"""The measures are those of sentence-transformers' evaluators, also where scores are equal."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation as peer

from holdfast.train.embedding.evaluation import SimilaritySet, evaluate_retrieval, evaluate_similarity
from tests.train.embedding.evaluation.words import Words, retrieval, sentence


@pytest.mark.parametrize("integers", [False, True], ids=["numbers", "ties"])
@pytest.mark.parametrize("seed", range(3))
def test_retrieval(seed: int, integers: bool):
    held_out = retrieval(seed)
    words = Words(seed, integers=integers)
    theirs = peer.InformationRetrievalEvaluator(
        {str(number): text for number, text in enumerate(held_out.queries)},
        {f"{number:03d}": text for number, text in enumerate(held_out.documents)},
        {str(number): {f"{each:03d}" for each in relevant} for number, relevant in enumerate(held_out.relevant)},
        corpus_chunk_size=11,
        score_functions={"dot": lambda queries, documents: queries @ documents.T},
        write_csv=False,
    )(SentenceTransformer(modules=[words], device="cpu"))
    found = evaluate_retrieval(held_out, words.encode, similarity="dot", recall_at=(1, 3, 5, 10), batch=9, tile=10)
    truth = {name: theirs[f"dot_{name}"] for name in found}
    assert found == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("seed", range(3))
def test_similarity(seed: int, similarity):
    draw = np.random.default_rng(seed)
    left, right = ([sentence(draw) for _ in range(40)] for _ in range(2))
    labels = draw.integers(6, size=40).astype(float).tolist()
    words = Words(seed)
    theirs = peer.EmbeddingSimilarityEvaluator(left, right, labels, similarity_fn_names=[similarity], write_csv=False)(
        SentenceTransformer(modules=[words], device="cpu")
    )
    found = evaluate_similarity(SimilaritySet(left, right, labels), words.encode, similarity=similarity, batch=7)
    assert found["spearman"] == pytest.approx(theirs[f"spearman_{similarity}"], abs=1e-9)
