"""How alike two embeddings are: the cosine of their angle, or their dot product."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from holdfast.core.errors import InvalidArgument

Similarity = Literal["cosine", "dot"]


def check_similarity(similarity: str) -> None:
    if similarity not in ("cosine", "dot"):
        raise InvalidArgument(f"similarity={similarity!r}: choose 'cosine' or 'dot'")


def prepared(embeddings: torch.Tensor, similarity: Similarity) -> torch.Tensor:
    """Return vectors whose dot products are the similarities."""
    return functional.normalize(embeddings, dim=-1) if similarity == "cosine" else embeddings


def pairwise(left: torch.Tensor, right: torch.Tensor, similarity: Similarity) -> torch.Tensor:
    """Return the similarity of each row with the same row of another column."""
    return (prepared(left, similarity) * prepared(right, similarity)).sum(-1)
