"""The ranks of a public call: torch.distributed's, with a clear error where torch is not installed."""

from __future__ import annotations

from holdfast.core.ranks import Ranks
from holdfast.core.torch_needed import require_torch


def ranks_of_call(caller: str, deadline_s: float) -> Ranks:
    """Return the ranks of this process group, or a single one. Raises Unsupported without torch."""
    require_torch(caller)
    from holdfast.adapters.comm import current_ranks

    return current_ranks(deadline_s)
