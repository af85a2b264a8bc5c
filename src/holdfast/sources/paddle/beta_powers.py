"""The arithmetic between an optimizer's step and the powers of its betas, which Paddle stores instead.

Paddle stores no step. It stores beta1 and beta2 to the power of step + 1, accumulated by float32
multiplication. Repeating these multiplications gives the same bits, and so the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Powers = tuple[float, float]

DEFAULT_BETAS = (0.9, 0.999)
_FIRST = (0.9, 0.95, 0.8, 0.85, 0.5, 0.0, 0.99)
_SECOND = (0.999, 0.95, 0.99, 0.98, 0.995, 0.9, 0.9995, 0.9999, 0.975, 0.997)
_STEPS = 200_000
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Steps:
    """The step for each pair of powers, and the betas, or None if the powers do not determine them."""

    betas: tuple[float, float] | None
    by_powers: dict[Powers, int]


def find_steps(powers: Iterable[Powers], noted: int | None = None) -> Steps | None:
    """Return the betas and steps that give exactly these powers; None if no common betas do.

    Below the smallest normal float32, powers lose precision and stop shrinking. Their correction is
    negligible by then. The trainer's step `noted` is used if it fits, otherwise the first step that does.
    """
    pairs = list(dict.fromkeys(powers))
    order_by_key = any(min(pair) >= _SMALLEST_NORMAL for pair in pairs)
    for wanted in (noted, None) if noted is not None else (None,):
        for betas in ((first, second) for second in _SECOND for first in _FIRST):
            found = _steps_with(betas, pairs, wanted)
            if found is not None:
                return Steps(betas if order_by_key else None, found)
    return _steps_with_own_betas(pairs, noted) if len(pairs) > 1 else None


def _steps_with_own_betas(pairs: list[Powers], noted: int | None) -> Steps | None:
    """Return the steps of parameters that have different betas."""
    separate = [find_steps([pair], noted) for pair in pairs]
    found = [steps.by_powers for steps in separate if steps is not None]
    return (
        Steps(None, {pair: step for own in found for pair, step in own.items()}) if len(found) == len(pairs) else None
    )


def _steps_with(betas: tuple[float, float], pairs: list[Powers], wanted: int | None) -> dict[Powers, int] | None:
    """Return the step of each pair of powers under these betas, `wanted` for ambiguous pairs; None if one has none."""
    found: dict[Powers, int] = {}
    for pair in pairs:
        begin, end = _common(_span(betas[0], pair[0]), _span(betas[1], pair[1]))
        if begin > end or (wanted is not None and begin != end and not begin <= wanted <= end):
            return None
        found[pair] = begin if wanted is None or begin == end else wanted
    return found


def powers_at(step: int, betas: tuple[float, float]) -> Iterator[np.float32]:
    """Yield the powers that Paddle stores after `step` steps."""
    for beta in betas:
        table = _table(beta)
        yield table[min(step, table.size - 1)]


@lru_cache(maxsize=32)
def _table(beta: float) -> npt.NDArray[Any]:
    with np.errstate(under="ignore"):
        return np.multiply.accumulate(np.full(_STEPS, beta, dtype=np.float32))


def _span(beta: float, power: float) -> tuple[int, int]:
    """Return the first and last step at which a beta has this power; an empty range if there is none."""
    table = _table(beta)
    if power < _SMALLEST_NORMAL:
        return int(np.searchsorted(-table, -_SMALLEST_NORMAL, side="right")), 2**62
    begin = int(np.searchsorted(-table, -np.float32(power), side="left"))
    return begin, int(np.searchsorted(-table, -np.float32(power), side="right")) - 1


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])
