"""How many steps an optimizer has done, from the powers of its betas, and back.

Paddle keeps no step: it keeps beta1 and beta2 to the power of the step plus one, each multiplied
anew in float32. The same multiplications, done again, give the same bits, and so the step.
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
    """The step for each pair of powers that was asked for; the betas, None where their powers do not tell them."""

    betas: tuple[float, float] | None
    by_powers: dict[Powers, int]


def find_steps(powers: Iterable[Powers], noted: int | None = None) -> Steps | None:
    """The betas and steps that give exactly these powers; None if no usual betas do.

    Below the smallest normal float32 powers lose their digits and stop shrinking. What they correct
    is nothing by then; the step that the trainer `noted` is taken if it fits, else the first that does.
    """
    asked = list(dict.fromkeys(powers))
    told = any(min(pair) >= _SMALLEST_NORMAL for pair in asked)
    for wanted in (noted, None) if noted is not None else (None,):
        for betas in ((first, second) for second in _SECOND for first in _FIRST):
            found = _steps_with(betas, asked, wanted)
            if found is not None:
                return Steps(betas if told else None, found)
    return _each_with_its_own(asked, noted) if len(asked) > 1 else None


def _each_with_its_own(asked: list[Powers], noted: int | None) -> Steps | None:
    """The steps of parameters that were given different betas."""
    apart = [find_steps([pair], noted) for pair in asked]
    found = [steps.by_powers for steps in apart if steps is not None]
    return (
        Steps(None, {pair: step for own in found for pair, step in own.items()}) if len(found) == len(asked) else None
    )


def _steps_with(betas: tuple[float, float], asked: list[Powers], wanted: int | None) -> dict[Powers, int] | None:
    """The step of each pair of powers under these betas, `wanted` for all that leave a choice; None if one has none."""
    found: dict[Powers, int] = {}
    for pair in asked:
        begin, end = _common(_span(betas[0], pair[0]), _span(betas[1], pair[1]))
        if begin > end or (wanted is not None and begin != end and not begin <= wanted <= end):
            return None
        found[pair] = begin if wanted is None or begin == end else wanted
    return found


def powers_at(step: int, betas: tuple[float, float]) -> Iterator[np.float32]:
    """The powers that Paddle keeps after so many steps."""
    for beta in betas:
        table = _table(beta)
        yield table[min(step, table.size - 1)]


@lru_cache(maxsize=32)
def _table(beta: float) -> npt.NDArray[Any]:
    with np.errstate(under="ignore"):
        return np.multiply.accumulate(np.full(_STEPS, beta, dtype=np.float32))


def _span(beta: float, power: float) -> tuple[int, int]:
    """The first and last step at which a beta has this power; an empty span if at none."""
    table = _table(beta)
    if power < _SMALLEST_NORMAL:
        return int(np.searchsorted(-table, -_SMALLEST_NORMAL, side="right")), 2**62
    begin = int(np.searchsorted(-table, -np.float32(power), side="left"))
    return begin, int(np.searchsorted(-table, -np.float32(power), side="right")) - 1


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])
