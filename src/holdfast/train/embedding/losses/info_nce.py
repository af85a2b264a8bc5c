"""InfoNCE: each query's positive against the other documents of the batch, and in more directions on request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import Columns
from holdfast.train.embedding.losses.false_negatives import FalseNegatives
from holdfast.train.embedding.losses.similarity import Similarity, check_similarity, prepared
from holdfast.train.embedding.losses.tiles import EXCLUDED, TILE_COLUMNS, TILE_ROWS, row_log_sum_exp

# By direction: whether its rows are queries (else positives), its candidates, whether a row's own candidates count.
_DIRECTIONS = {
    "query_to_doc": (True, "documents", True),
    "query_to_query": (True, "queries", False),
    "doc_to_query": (False, "queries", True),
    "doc_to_doc": (False, "documents", False),
    "positive_to_positive": (False, "positives", False),
}
_WITHOUT_POSITIVE = tuple(name for name, (_, _, counts) in _DIRECTIONS.items() if not counts)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The embeddings that rows are compared with, those of a guide, and the numbers of their texts."""

    embeddings: torch.Tensor
    guides: torch.Tensor | None
    texts: torch.Tensor | None


class InfoNCE(nn.Module):
    """Cross entropy of each query's positive among candidates, with similarities over a temperature as logits.

    Args:
        temperature: Divides the similarities.
        learned: Train the temperature, as the logarithm of its inverse (`log_scale`).
        directions: "query_to_doc": a query against all positives and negatives; "doc_to_query": a positive against all
            queries; "query_to_query": a query against the others; "doc_to_doc": a positive against the documents of
            other queries; "positive_to_positive": against the positives of other queries.
        joint: One softmax over the candidates of all directions; else one for each, averaged, which with
            ("query_to_doc", "doc_to_query") is the symmetric loss.
        similarity: "cosine" or "dot".
        false_negatives: Candidates that are left out. A row's own positive always counts.
        tile_rows: Rows of scores that exist at once.
        tile_columns: Candidates of these rows.

    `texts` [rows, columns], numbers that equal texts share, leaves out candidates with the text of a row's query or
    positive. `guides`, a guide's embeddings by column, are for `false_negatives`.
    """

    def __init__(
        self,
        temperature: float = 0.05,
        *,
        learned: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        joint: bool = True,
        similarity: Similarity = "cosine",
        false_negatives: FalseNegatives | None = None,
        tile_rows: int = TILE_ROWS,
        tile_columns: int = TILE_COLUMNS,
    ) -> None:
        super().__init__()
        if not (math.isfinite(temperature) and temperature > 0):
            raise InvalidArgument(f"temperature={temperature!r} must be a number above 0")
        check_similarity(similarity)
        _check_directions(directions, joint=joint)
        scale = torch.tensor(-math.log(temperature), dtype=torch.float64)
        self.log_scale = nn.Parameter(scale.float()) if learned else None
        self._scale = 1.0 / temperature
        self.directions, self.joint, self.similarity = tuple(directions), joint, similarity
        self.false_negatives = false_negatives
        self._tile = (tile_rows, tile_columns)

    @property
    def temperature(self) -> float:
        return math.exp(-self.log_scale.item()) if self.log_scale is not None else 1.0 / self._scale

    def forward(
        self,
        columns: Columns,
        *,
        texts: torch.Tensor | None = None,
        guides: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if len(columns.own) < 2:
            raise InvalidArgument(f"InfoNCE needs queries and positives, and got {len(columns.own)} columns")
        if columns.total == 1 and len(columns.own) == 2:
            raise InvalidArgument(
                "a batch of one pair has no negatives: InfoNCE compares a query with several documents"
            )
        _check_rows(columns, texts, guides)
        scale = self._scale if self.log_scale is None else self.log_scale.exp()
        batch = self._batch(columns, texts, guides)
        positives = (batch.own(0) * batch.own(1)).sum(-1)
        limits = None
        if self.false_negatives is not None and batch.guides is not None:
            limits = self.false_negatives.limits((batch.guides[0] * batch.guides[1]).sum(-1)[batch.rows])
        found = []
        for name in self.directions:
            of_queries, kind, own_counts = _DIRECTIONS[name]
            rows, candidates = batch.compared(0 if of_queries else 1, kind, limits)
            found.append(self._log_sum_exp(rows, candidates, scale, own_counts=own_counts))
        stacked = torch.stack(found)
        normalizer = stacked.logsumexp(0) if self.joint else stacked.mean(0)
        return (normalizer - positives * scale).sum() / columns.total

    def _batch(self, columns: Columns, texts: torch.Tensor | None, guides: Sequence[torch.Tensor] | None) -> _Batch:
        return _Batch(
            [prepared(column, self.similarity) for column in columns.every],
            self._guides(columns, guides),
            None if texts is None else columns.gather(texts),
            slice(columns.first, columns.first + columns.rows),
        )

    def _guides(self, columns: Columns, guides: Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Return the embeddings by which false negatives are told, of all ranks."""
        if self.false_negatives is None:
            return None
        if guides is None:
            return [prepared(column.detach(), self.similarity) for column in columns.every]
        return [prepared(columns.gather(guide), "cosine") for guide in guides]

    def _log_sum_exp(
        self, rows: _Rows, candidates: _Candidates, scale: float | torch.Tensor, *, own_counts: bool
    ) -> torch.Tensor:
        def scores(of_rows: slice, of_columns: slice) -> torch.Tensor:
            found = rows.embeddings[of_rows] @ candidates.embeddings[of_columns].T * scale
            return found.masked_fill(rows.left_out(candidates, of_rows, of_columns, own_counts=own_counts), EXCLUDED)

        return row_log_sum_exp(len(rows.embeddings), len(candidates.embeddings), scores, *self._tile)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The embeddings of all ranks by column, those of a guide, the numbers of the texts, and this rank's rows."""

    columns: Sequence[torch.Tensor]
    guides: Sequence[torch.Tensor] | None
    texts: torch.Tensor | None
    rows: slice

    def own(self, column: int) -> torch.Tensor:
        return self.columns[column][self.rows]

    def compared(self, row_column: int, kind: str, limits: torch.Tensor | None) -> tuple[_Rows, _Candidates]:
        """Return this rank's rows of a column, and what they are compared with: queries, positives or documents."""
        chosen = {"queries": [0], "positives": [1], "documents": list(range(1, len(self.columns)))}[kind]
        rows = _Rows(
            self.own(row_column),
            None if self.guides is None else self.guides[row_column][self.rows],
            None if self.texts is None else self.texts[self.rows, :2],
            limits,
            self.rows.start,
            len(self.columns[0]),
        )
        candidates = _Candidates(
            torch.cat([self.columns[column] for column in chosen]),
            None if self.guides is None else torch.cat([self.guides[column] for column in chosen]),
            None if self.texts is None else self.texts[:, chosen].T.flatten(),
        )
        return rows, candidates


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's rows of one direction, and what tells which candidates do not count for them."""

    embeddings: torch.Tensor
    guides: torch.Tensor | None
    texts: torch.Tensor | None  # [rows, 2]: of the query and of the positive
    limits: torch.Tensor | None  # similarities of the guide above which candidates are left out
    first: int
    total: int

    @torch.no_grad()
    def left_out(self, candidates: _Candidates, rows: slice, columns: slice, *, own_counts: bool) -> torch.Tensor:
        """Return a mask of the candidates that do not count."""
        device = self.embeddings.device
        row = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.first
        column = torch.arange(columns.start, columns.stop, device=device)
        out = torch.zeros(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool, device=device)
        if self.limits is not None and self.guides is not None and candidates.guides is not None:
            out |= self.guides[rows] @ candidates.guides[columns].T > self.limits[rows, None]
        if self.texts is not None and candidates.texts is not None:
            for text in self.texts[rows].unbind(1):
                out |= text[:, None] == candidates.texts[columns]
        if own_counts:
            return out & (column != row)  # the positive is the row's own candidate of the first column
        return out | (column % self.total == row)


def _check_rows(columns: Columns, texts: torch.Tensor | None, guides: Sequence[torch.Tensor] | None) -> None:
    """Raise InvalidArgument if texts or guides are not those of this rank's rows and columns."""
    shape = (columns.rows, len(columns.own))
    if texts is not None and tuple(texts.shape) != shape:
        raise InvalidArgument(f"texts are {list(texts.shape)}; expected a number for each of {shape} rows and columns")
    if guides is None:
        return
    if len(guides) != shape[1]:
        raise InvalidArgument(f"there are guides for {len(guides)} columns, and {shape[1]} columns")
    for number, guide in enumerate(guides):
        if guide.dim() != 2 or len(guide) != shape[0]:
            raise InvalidArgument(f"guides of column {number} are {list(guide.shape)}; expected {shape[0]} rows")


def _check_directions(directions: Sequence[str], *, joint: bool) -> None:
    unknown = [name for name in directions if name not in _DIRECTIONS]
    if unknown:
        raise InvalidArgument(f"there is no direction {unknown[0]!r}: choose from {', '.join(_DIRECTIONS)}")
    if "query_to_doc" not in directions or len(set(directions)) != len(directions):
        raise InvalidArgument(f"directions={tuple(directions)}: name each once, query_to_doc among them")
    without = [name for name in directions if name in _WITHOUT_POSITIVE]
    if not joint and without:
        raise InvalidArgument(f"{without[0]} has no positive among its candidates: it takes joint=True")
