"""The best documents of each query, found tile by tile: the matrix of all scores is never whole."""

from __future__ import annotations

import torch

from holdfast.core.errors import InvalidArgument


class TopDocuments:
    """Keeps the `most` documents of each query with the highest scores; of equal scores, the lower document number.

    A score that is NaN or infinite counts as infinite, so that it is not lost among others.

    Args:
        queries: Embeddings [queries, dim].
        most: Documents that are kept for each query.
        tile: Queries whose scores exist at once, and documents of these.
    """

    def __init__(self, queries: torch.Tensor, most: int, tile: int = 4096) -> None:
        if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
            raise InvalidArgument(f"tile={tile!r} must be an integer of at least 1")
        self.queries, self.most, self._tile = queries, most, tile
        self.scores = queries.new_empty((len(queries), 0))
        self.documents = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)

    def add(self, documents: torch.Tensor, embeddings: torch.Tensor) -> None:
        """Compare all queries with some documents, in any order: their numbers and embeddings [documents, dim]."""
        order = documents.argsort()
        documents, embeddings = documents[order], embeddings[order]
        for begin in range(0, len(documents), self._tile):
            here = slice(begin, begin + self._tile)
            found = [
                self._best(queries @ embeddings[here].T, documents[here])
                for queries in torch.split(self.queries, self._tile)
            ]
            self.merge(torch.cat([scores for scores, _ in found]), torch.cat([numbers for _, numbers in found]))

    def merge(self, scores: torch.Tensor, documents: torch.Tensor) -> None:
        """Keep the best of what is kept and of other documents: scores and numbers [queries, any number]."""
        scores = torch.cat((self.scores, scores), dim=1)
        documents = torch.cat((self.documents, documents), dim=1)
        order = documents.argsort(dim=1)
        scores, documents = scores.gather(1, order), documents.gather(1, order)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.most]
        self.scores, self.documents = scores.gather(1, order), documents.gather(1, order)

    def _best(self, scores: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best of a tile. `topk` alone would choose among equal scores as it likes."""
        scores = scores.masked_fill(~scores.isfinite(), torch.inf)
        width = scores.shape[1]
        count = min(self.most, width)
        least = scores.topk(count, dim=1).values[:, -1:]
        place = torch.arange(width, device=scores.device)
        rank = torch.where(scores > least, place, torch.where(scores == least, place + width, place + 2 * width))
        chosen = rank.topk(count, dim=1, largest=False).indices
        return scores.gather(1, chosen), documents[chosen]
