"""The lines of `holdfast show` about quantized weights: their scales, and scales that are missing or do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.cli.render import count
from holdfast.convert.quantization_config import config_block, quantization_of
from holdfast.core.errors import HoldfastError
from holdfast.plan.files import TensorSpec
from holdfast.plan.weight_scales import ScaledWeight, scaled_weights

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ShownScales:
    """The quantized weights of a group by key, and the reason for each whose value is unknown."""

    weights: dict[str, ScaledWeight] = field(default_factory=dict)
    problems: dict[str, Exception] = field(default_factory=dict)
    method: str | None = None

    @staticmethod
    def of(checkpoint: Checkpoint, group: str) -> ShownScales:
        members = checkpoint.contents.groups[group]
        if members.kind != "module":
            return ShownScales()
        specs = {key: TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in members.tensors.items()}
        config = _config(checkpoint)
        weights, problems = scaled_weights(specs, config_block(config))
        method = quantization_of(config).get("quant_method")
        return ShownScales(weights, problems, method if isinstance(method, str) else None)

    def lines(self) -> Iterator[str]:
        """Yield a line for each kind of quantized weight, and for the first problems."""
        kinds = Counter(f"{weight.dtype} {weight.text}" for weight in self.weights.values())
        for kind, number in kinds.most_common():
            yield f"quantized: {count(number, 'weight')}, {kind}"
        for problem in list(self.problems.values())[:_SHOWN]:
            yield f"quantized: {problem}"
        if len(self.problems) > _SHOWN:
            yield f"quantized: {len(self.problems) - _SHOWN} more like these"
        if self.method is not None:
            yield f"quantized: config.json says {self.method}"

    def suffix(self, key: str) -> str:
        """Return what to print behind a weight."""
        return f"  {self.weights[key].text}" if key in self.weights else ""

    def fields(self, key: str) -> dict[str, Any]:
        """Return the fields of a weight for JSON."""
        weight = self.weights.get(key)
        if weight is None:
            return {}
        return {"scales": {"key": weight.scale, "per": weight.scheme, "block": list(weight.block)}}


def _config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    try:
        return checkpoint.config()
    except HoldfastError:
        return None
