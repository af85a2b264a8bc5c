"""Candidates that are no negatives, though they are another row's: too like the query, as the positive is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class FalseNegatives:
    """Leave out candidates whose similarity to a row exceeds that of the row's query to its positive, less a margin.

    The similarities are those of a guide, a model that is not trained, if the loss is given its embeddings (GISTEmbed:
    Solatorio, 2024), else those of the model itself.

    Args:
        margin: How far below the positive's similarity candidates still count.
        of: "absolute": the margin is subtracted; "relative": it is a share of the positive's similarity.
    """

    margin: float = 0.0
    of: Literal["absolute", "relative"] = "absolute"

    def __post_init__(self) -> None:
        if self.of not in ("absolute", "relative"):
            raise InvalidArgument(f"FalseNegatives of={self.of!r}: choose 'absolute' or 'relative'")

    def limits(self, positives: torch.Tensor) -> torch.Tensor:
        """Return for each row the similarity above which candidates are left out."""
        return positives - (self.margin if self.of == "absolute" else positives.abs() * self.margin)
