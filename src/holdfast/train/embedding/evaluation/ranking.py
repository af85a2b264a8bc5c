"""Measures of a ranking with graded relevance: nDCG, recall and the reciprocal rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NDCG_AT = MRR_AT = 10


def ndcg(ranked: Sequence[int], relevant: Mapping[int, float], at: int = NDCG_AT) -> float:
    """Return the gain of the first documents, discounted by rank, over that of the best order.

    The gain of a document is its grade, as in trec_eval.
    """
    best = sorted(relevant.values(), reverse=True)
    return _discounted([relevant.get(document, 0.0) for document in ranked[:at]]) / _discounted(best[:at])


def recall(ranked: Sequence[int], relevant: Mapping[int, float], at: int) -> float:
    """Return the share of the relevant documents that are among the first."""
    return sum(document in relevant for document in ranked[:at]) / len(relevant)


def reciprocal_rank(ranked: Sequence[int], relevant: Mapping[int, float], at: int = MRR_AT) -> float:
    """Return 1 over the rank of the first relevant document; 0 if it is not among the first."""
    ranks = (rank for rank, document in enumerate(ranked[:at], 1) if document in relevant)
    return 1.0 / next(ranks, math.inf)


def _discounted(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))
