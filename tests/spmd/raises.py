"""Operations that still raise, each with its reason: everything else in the matrix must not."""

from __future__ import annotations

import fnmatch

AUTOGRAD = "torch's own gradient formula puts a plain tensor beside the DTensor, and the dispatcher refuses it first"
RAISES = {
    "cumprod_*": AUTOGRAD,
    "prod_0": AUTOGRAD,
    "prod_-1": AUTOGRAD,
    "quantile": AUTOGRAD,
    "polar": "torch cannot hash the complex number in the gradient formula, before any rule is asked",
    "where_plain": "a plain mask for torch.where: the dispatcher refuses it before any rule is asked",
    "masked_fill_plain": "a plain mask for masked_fill: the dispatcher refuses it before any rule is asked",
    "embedding_plain": "plain token ids may differ from rank to rank: they must be placed by the caller",
}


def reason(operation: str) -> str | None:
    """Why this operation may raise."""
    return next((why for pattern, why in RAISES.items() if fnmatch.fnmatchcase(operation, pattern)), None)
