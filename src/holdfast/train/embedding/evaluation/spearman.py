"""Similarity on a held-out set: Spearman's correlation of the cosine of pairs with their labels."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from holdfast.train.embedding.columns import gather_rows
from holdfast.train.embedding.evaluation.encoded_share import Encode, encoded_share
from holdfast.train.embedding.evaluation.held_out import SimilaritySet
from holdfast.train.embedding.losses.similarity import Similarity, check_similarity, pairwise


@torch.no_grad()
def evaluate_similarity(
    held_out: SimilaritySet,
    encode: Encode,
    *,
    batch: int = 64,
    similarity: Similarity = "cosine",
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Return Spearman's rank correlation of similarities and labels, the same on every rank. Collective.

    It is NaN if an embedding is not finite, or if all similarities or all labels are equal.

    Args:
        held_out: Pairs of texts with a label.
        encode: Returns the embeddings [rows, dim] of a list of texts; its second argument is "query" for both.
            Every rank calls it equally often.
        batch: Texts that are encoded at once.
        similarity: "cosine" or "dot".
        group: The ranks that share the work.
    """
    check_similarity(similarity)
    texts = [*held_out.left, *held_out.right]
    found = list(encoded_share(texts, encode, "query", batch=batch, group=group))
    numbers = gather_rows(torch.cat([number for number, _ in found]), group)
    embeddings = gather_rows(torch.cat([embedding for _, embedding in found]), group)[numbers.argsort()]
    left, right = embeddings[: len(held_out.left)], embeddings[len(held_out.left) :]
    scores = pairwise(left, right, similarity).cpu().double().numpy()
    return {"spearman": spearman(scores, np.asarray(held_out.labels, dtype=np.float64))}


def spearman(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Return the correlation of the ranks; equal values share the mean of their ranks."""
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return math.nan
    ranks = [_ranks(values) for values in (left, right)]
    first, second = (rank - rank.mean() for rank in ranks)
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else math.nan


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[place], dtype=np.float64)
