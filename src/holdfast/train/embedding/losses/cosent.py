"""CoSENT: pairs with a higher label shall be more alike than those with a lower one (Su, 2022)."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import Columns
from holdfast.train.embedding.losses.similarity import Similarity, check_similarity, prepared
from holdfast.train.embedding.losses.tiles import EXCLUDED


class CoSENT(nn.Module):
    """log(1 + sum of exp((s_i - s_j) / temperature)) over all pairs i, j of the batch whose labels order them i < j.

    s is the similarity of the first and the second column; `labels` [rows] are any numbers that grow with it.
    """

    def __init__(self, temperature: float = 0.05, *, similarity: Similarity = "cosine") -> None:
        super().__init__()
        if not temperature > 0:
            raise InvalidArgument(f"temperature={temperature!r} must be a number above 0")
        check_similarity(similarity)
        self.temperature, self.similarity = temperature, similarity

    def forward(self, columns: Columns, *, labels: torch.Tensor) -> torch.Tensor:
        if len(columns.own) != 2 or labels.shape != (columns.rows,):
            raise InvalidArgument(
                f"CoSENT needs two columns and a label for each row; got {len(columns.own)} columns of "
                f"{columns.rows} rows and labels {list(labels.shape)}"
            )
        columns.require_numbers("labels", labels)
        left, right = (prepared(column, self.similarity) for column in columns.every)
        order = columns.gather(labels).argsort()
        ranked = columns.gather(labels)[order]
        scores = ((left * right).sum(-1) / self.temperature)[order]
        # after[i]: the log-sum-exp of -s over the pairs from place i on; `above[i]` is the first with a higher label.
        after = torch.cat(((-scores).flip(0).logcumsumexp(0).flip(0), scores.new_full((1,), EXCLUDED)))
        above = torch.searchsorted(ranked, ranked, right=True)
        loss = torch.cat((scores.new_zeros(1), scores + after[above])).logsumexp(0)
        return loss if columns.group is None else loss / columns.group.size()  # all ranks compute the whole loss
