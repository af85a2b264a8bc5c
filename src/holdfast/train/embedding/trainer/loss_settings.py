"""The [loss] settings: which loss, with its options, and over which dims."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.losses import CoSENT, FalseNegatives, InfoNCE, KLDistillation, MarginMSE, Matryoshka

_MARGIN = ("margin", "margin_of")  # of false negatives, of InfoNCE only
_KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "infonce": (InfoNCE, ("temperature", "learned", "directions", "joint", "similarity", *_MARGIN)),
    "cosent": (CoSENT, ("temperature", "similarity")),
    "margin_mse": (MarginMSE, ("similarity",)),
    "kl": (KLDistillation, ("temperature", "teacher_temperature", "similarity")),
}


@dataclass(frozen=True, slots=True)
class LossConfig:
    """A loss by name; options that are left out have the defaults of its class.

    `kind` is "infonce" (`InfoNCE`), "cosent" (`CoSENT`), "margin_mse" (`MarginMSE`) or "kl" (`KLDistillation`).
    `margin`, with `margin_of` "absolute" or "relative", leaves out false negatives (`FalseNegatives`). With
    `embedding.dims` the loss is a `Matryoshka` over these; `dim_weights` are their weights.
    """

    kind: str = "infonce"
    temperature: float | None = None
    learned: bool | None = None
    directions: tuple[str, ...] | None = None
    joint: bool | None = None
    similarity: str | None = None
    margin: float | None = None
    margin_of: str | None = None
    teacher_temperature: float | None = None
    dim_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidArgument(f"loss.kind={self.kind!r}: choose one of {', '.join(_KINDS)}")
        known = _KINDS[self.kind][1]
        for name in self._given():
            if name not in known:
                raise InvalidArgument(f"loss.{name}: {self.kind} has no such option, only {', '.join(known)}")
        if self.margin_of is not None and self.margin is None:
            raise InvalidArgument(f"loss.margin_of={self.margin_of!r} says how loss.margin counts, which is missing")

    def make(self, dims: tuple[int, ...] = ()) -> nn.Module:
        """Return the loss; with dims, a Matryoshka over them."""
        options = {name: value for name, value in self._given().items() if name not in _MARGIN}
        if self.margin is not None:
            of: Any = self.margin_of or "absolute"
            options["false_negatives"] = FalseNegatives(self.margin, of)
        loss: nn.Module = _KINDS[self.kind][0](**options)
        if dims:
            return Matryoshka(loss, dims, self.dim_weights)
        if self.dim_weights is not None:
            raise InvalidArgument("loss.dim_weights are the weights of embedding.dims, which are missing")
        return loss

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None and name not in _COMMON}


_COMMON = ("kind", "dim_weights")
