"""Texts that the ranks of a group encode together: each a share, with as many calls of the encoder as every other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument

Side = Literal["query", "document"]
# Returns the embeddings [rows, dim] of some texts: of queries, or of documents, for prompts that differ by side.
Encode = Callable[[list[str], Side], torch.Tensor]


def share_ranges(count: int, batch: int, group: dist.ProcessGroup | None) -> list[tuple[int, int]]:
    """Return this rank's ranges of `count` items, as many ranges on every rank; some may be empty.

    A model that is sharded over ranks runs collectives, so every rank calls it equally often.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InvalidArgument(f"batch={batch!r} must be an integer of at least 1")
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    rounds = -(-count // (batch * ranks))
    begins = [(number * ranks + rank) * batch for number in range(rounds)]
    return [(min(begin, count), min(begin + batch, count)) for begin in begins]


@torch.no_grad()
def encoded_share(
    texts: Sequence[str], encode: Encode, side: Side, *, batch: int, group: dist.ProcessGroup | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the numbers and embeddings of this rank's texts, a batch at a time. Collective where the encoder is.

    Texts of similar length are encoded together, longest first, so that little of a batch is padding.
    """
    order = sorted(range(len(texts)), key=lambda number: (-len(texts[number]), number))
    for begin, end in share_ranges(len(texts), batch, group):
        own = order[begin:end]
        found = encode([texts[number] for number in own or order[-1:]], side)
        if found.dim() != 2 or found.shape[0] != max(len(own), 1):
            raise InvalidArgument(
                f"encode returned {list(found.shape)} for {max(len(own), 1)} texts; expected [rows, dim]"
            )
        wide = found if found.dtype == torch.float64 else found.float()
        yield torch.tensor(own, dtype=torch.int64, device=found.device), wide[: len(own)]
