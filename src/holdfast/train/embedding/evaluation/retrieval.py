"""Retrieval on a held-out set: every query is compared with every document, each rank with its share of these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_rows
from holdfast.train.embedding.evaluation.encoded_share import Encode, encoded_share
from holdfast.train.embedding.evaluation.held_out import RetrievalSet
from holdfast.train.embedding.evaluation.ranking import MRR_AT, NDCG_AT, ndcg, recall, reciprocal_rank
from holdfast.train.embedding.evaluation.top_documents import TopDocuments
from holdfast.train.embedding.losses.similarity import Similarity, check_similarity, prepared


@torch.no_grad()
def evaluate_retrieval(
    held_out: RetrievalSet,
    encode: Encode,
    *,
    batch: int = 64,
    recall_at: Sequence[int] = (1, 10, 100),
    similarity: Similarity = "cosine",
    group: dist.ProcessGroup | None = None,
    tile: int = 4096,
) -> dict[str, float]:
    """Return nDCG@10, MRR@10 and recall, averaged over queries and the same on every rank. Collective.

    Documents with equal scores are ranked by their order in the set. Everything is NaN if an embedding is not finite.

    Args:
        held_out: Queries, documents, and which belong together.
        encode: Returns the embeddings [rows, dim] of a list of texts; its second argument is "query" or "document".
            Every rank calls it equally often.
        batch: Texts that are encoded at once.
        recall_at: The numbers of documents for recall.
        similarity: "cosine" or "dot".
        group: The ranks that share the work: each encodes its share, and compares all queries with its documents.
        tile: Queries and documents whose scores exist at once.
    """
    check_similarity(similarity)
    if not recall_at or any(isinstance(at, bool) or not isinstance(at, int) or at < 1 for at in recall_at):
        raise InvalidArgument(f"recall_at={list(recall_at)!r} must be integers of at least 1")
    found = list(encoded_share(held_out.queries, encode, "query", batch=batch, group=group))
    numbers = gather_rows(torch.cat([number for number, _ in found]), group)
    queries = gather_rows(torch.cat([embedding for _, embedding in found]), group)[numbers.argsort()]
    top = TopDocuments(prepared(queries, similarity), max(NDCG_AT, MRR_AT, *recall_at), tile)
    for documents, embeddings in encoded_share(held_out.documents, encode, "document", batch=batch, group=group):
        top.add(documents, prepared(embeddings, similarity))
    if group is not None:
        top = _merged(top, group)
    return _averages(top, held_out, recall_at)


def _merged(top: TopDocuments, group: dist.ProcessGroup) -> TopDocuments:
    """Return the best documents of all ranks. They keep different numbers of them: rows are documents here."""
    scores, documents = (gather_rows(values.T.contiguous(), group).T for values in (top.scores, top.documents))
    whole = TopDocuments(top.queries, top.most)
    whole.merge(scores, documents)
    return whole


def _averages(top: TopDocuments, held_out: RetrievalSet, recall_at: Sequence[int]) -> dict[str, float]:
    names = [f"ndcg@{NDCG_AT}", f"mrr@{MRR_AT}", *(f"recall@{at}" for at in recall_at)]
    if not top.scores.isfinite().all():
        return dict.fromkeys(names, math.nan)
    rows = [
        (ndcg(ranked, relevant), reciprocal_rank(ranked, relevant), *(recall(ranked, relevant, at) for at in recall_at))
        for ranked, relevant in zip(top.documents.tolist(), held_out.relevant, strict=True)
    ]
    return {name: math.fsum(column) / len(rows) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
