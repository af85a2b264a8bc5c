"""Distillation: a teacher's scores of each query's documents, as margins (MarginMSE) or as a distribution (KL)."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import Columns
from holdfast.train.embedding.losses.similarity import Similarity, check_similarity, pairwise


class MarginMSE(nn.Module):
    """The mean square of how the margins of positive and negatives differ from the teacher's (Hofstätter et al., 2020).

    `scores` [rows, documents] are the teacher's, of the positive first; or its margins [rows, negatives].
    """

    def __init__(self, *, similarity: Similarity = "dot") -> None:
        super().__init__()
        check_similarity(similarity)
        self.similarity = similarity

    def forward(self, columns: Columns, *, scores: torch.Tensor) -> torch.Tensor:
        found = _document_scores(columns, self.similarity)
        columns.require_numbers("scores", scores)
        margins = found[:, :1] - found[:, 1:]
        wanted = scores.detach().to(margins.dtype)
        if wanted.shape == found.shape:
            wanted = wanted[:, :1] - wanted[:, 1:]
        if wanted.shape != margins.shape:
            shape = list(scores.shape)
            raise InvalidArgument(f"scores has shape {shape}; expected {list(found.shape)}, or {list(margins.shape)}")
        return (margins - wanted).square().sum() / (columns.total * margins.shape[1])


class KLDistillation(nn.Module):
    """The KL divergence of the softmax over each query's documents from the teacher's, times the square of T.

    `scores` [rows, documents] are the teacher's, of the positive first.
    """

    def __init__(
        self, temperature: float = 1.0, *, teacher_temperature: float | None = None, similarity: Similarity = "dot"
    ) -> None:
        super().__init__()
        for value in (temperature, temperature if teacher_temperature is None else teacher_temperature):
            if not value > 0:
                raise InvalidArgument(f"temperature={value!r} must be a number above 0")
        check_similarity(similarity)
        self.temperature, self.similarity = temperature, similarity
        self.teacher_temperature = temperature if teacher_temperature is None else teacher_temperature

    def forward(self, columns: Columns, *, scores: torch.Tensor) -> torch.Tensor:
        found = _document_scores(columns, self.similarity)
        columns.require_numbers("scores", scores)
        if scores.shape != found.shape:
            raise InvalidArgument(f"scores has shape {list(scores.shape)}; expected {list(found.shape)}")
        own = (found / self.temperature).log_softmax(1)
        wanted = (scores.detach().to(found.dtype) / self.teacher_temperature).log_softmax(1)
        divergence = (wanted.exp() * (wanted - own)).sum() / columns.total
        return divergence * self.temperature**2


def _document_scores(columns: Columns, similarity: Similarity) -> torch.Tensor:
    """Return the similarity of each query with its own documents: [rows, documents]."""
    query, *documents = columns.own
    if len(documents) < 2:
        raise InvalidArgument(f"distillation needs 2 documents for each query, and got {len(documents)}")
    return torch.stack([pairwise(query, document, similarity) for document in documents], dim=1)
