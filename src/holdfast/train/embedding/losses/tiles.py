"""Log-sum-exp over the scores of many rows and candidates, tile by tile: the matrix of all scores is never whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

EXCLUDED = -1e30  # the score of a candidate that does not count: no exponential of it is more than 0
TILE_ROWS, TILE_COLUMNS = 512, 2048

# Returns the scores of rows [begin, end) and candidates [begin, end).
Scores = Callable[[slice, slice], torch.Tensor]


def row_log_sum_exp(
    rows: int, candidates: int, scores: Scores, tile_rows: int = TILE_ROWS, tile_columns: int = TILE_COLUMNS
) -> torch.Tensor:
    """Return the log-sum-exp of each row's scores. Backward computes every tile of scores again."""
    found = []
    for row in range(0, rows, tile_rows):
        of_rows = slice(row, min(row + tile_rows, rows))
        parts = [
            checkpoint(
                _tile,
                scores,
                of_rows,
                slice(column, min(column + tile_columns, candidates)),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for column in range(0, candidates, tile_columns)
        ]
        found.append(torch.stack(parts).logsumexp(0))
    return torch.cat(found)


def _tile(scores: Scores, rows: slice, columns: slice) -> torch.Tensor:
    return scores(rows, columns).logsumexp(1)
