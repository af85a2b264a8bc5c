"""Initial values of the rows of new tokens: the mean of the known rows, zeros, or the mean of chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class InitialRows:
    """How new rows begin. `like` has, by row, the known rows whose mean a token takes."""

    init: str
    used: int  # rows of known tokens; those after them are padding and are in no mean
    like: Mapping[int, Sequence[int]]

    def write(self, whole: torch.Tensor, rows: Sequence[int]) -> None:
        """Write the initial values of some rows of a whole tensor."""
        with torch.no_grad():
            whole[torch.tensor(list(rows), device=whole.device)] = (
                self._mean(whole) if self.init == "mean" else torch.zeros_like(whole[0])
            )
            for row, others in self.like.items():
                known = whole[torch.tensor(list(others), device=whole.device)]
                whole[row] = known.double().mean(0).to(whole.dtype)

    def _mean(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the mean of the known rows, summed in float64."""
        used = min(self.used, whole.shape[0])
        total = torch.zeros(whole.shape[1:], dtype=torch.float64, device=whole.device)
        for at in range(0, used, _ROWS_AT_ONCE):
            total += whole[at : min(at + _ROWS_AT_ONCE, used)].double().sum(0)
        return (total / max(used, 1)).to(whole.dtype)
