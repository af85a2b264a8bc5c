"""Operations that still raise, each with its reason: everything else in the matrix must not."""

from __future__ import annotations

import fnmatch

RAISES = {
    "quantile": "with `dim=` or a tensor of quantiles torch.quantile puts a plain tensor beside the DTensor, "
    "and the dispatcher refuses it first; `x.quantile(0.3)` works",
    "where_plain": "a plain mask for torch.where: taking it would double the time of every torch.where on DTensors",
    "embedding_plain": "plain token ids may differ from rank to rank: they must be placed by the caller",
}


def reason(operation: str) -> str | None:
    """Why this operation may raise."""
    return next((why for pattern, why in RAISES.items() if fnmatch.fnmatchcase(operation, pattern)), None)
