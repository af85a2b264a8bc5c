"""A small encoder of texts, as Holdfast and as sentence-transformers call one; and held-out sets of a few words."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from holdfast.train.embedding.evaluation import RetrievalSet

DIM = 6


class Words(nn.Module):
    """The sum of a vector for each word. Vectors of few integers make many similarities equal."""

    max_seq_length = 8

    def __init__(self, seed: int = 0, *, integers: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        table = torch.randn(50, DIM, generator=draw)
        self.table = nn.Parameter(table.sign() if integers else table)

    def tokenize(self, texts, **_):
        return {"texts": list(texts)}

    def preprocess(self, texts, **_):
        return {"texts": list(texts)}

    def forward(self, features):
        return {**features, "sentence_embedding": self.encode(features["texts"])}

    def encode(self, texts, side="query"):
        return torch.stack([self.table[[int(word) for word in text.split()]].sum(0) for text in texts])

    def get_embedding_dimension(self) -> int:
        return DIM


def sentence(draw: np.random.Generator) -> str:
    return " ".join(str(word) for word in draw.integers(50, size=int(draw.integers(1, 7))))


def retrieval(seed: int = 0, queries: int = 13, documents: int = 57, *, graded: bool = False) -> RetrievalSet:
    draw = np.random.default_rng(seed)
    grades = [
        {
            int(document): float(draw.integers(1, 4)) if graded else 1.0
            for document in draw.choice(documents, int(draw.integers(1, 15)), replace=False)
        }
        for _ in range(queries)
    ]
    return RetrievalSet([sentence(draw) for _ in grades], [sentence(draw) for _ in range(documents)], grades)
