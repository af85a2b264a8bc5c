"""Statistics of tensors, computed in two passes over windows: moments and counts, then a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import HoldfastError
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import JobStop, PageJob
from holdfast.web.tensor_windows import Values, WindowReader, as_values

MOST_KEYS = 1000
_BINS = 32


@dataclass(slots=True)
class Moments:
    """Counts and moments of the elements seen so far; mean and deviation are merged a window at a time."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    spread: float = 0.0  # the sum of squared distances from the mean
    squares: float = 0.0

    def add(self, values: Values) -> None:
        """Add the elements of a window."""
        finite = values[np.isfinite(values)]
        nan = int(np.count_nonzero(np.isnan(values)))
        self.nan += nan
        self.inf += values.size - finite.size - nan
        if not finite.size:
            return
        self.zeros += int(finite.size - np.count_nonzero(finite))
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(finite.mean())
            spread = float(np.square(finite - mean).sum())
            self.squares += float(np.square(finite).sum())
        total = self.count + finite.size
        gap = mean - self.mean
        self.spread += spread + gap * gap * self.count * finite.size / total
        self.mean += gap * finite.size / total
        self.count = total

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        if not self.count:
            empty: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "norm", "std"))
            return empty | {"nan": self.nan, "inf": self.inf, "zeros": self.zeros}
        return {
            "min": self.low,
            "max": self.high,
            "mean": self.mean,
            "norm": math.sqrt(self.squares),
            "std": math.sqrt(self.spread / self.count) if self.spread >= 0 else math.nan,
            "nan": self.nan,
            "inf": self.inf,
            "zeros": self.zeros,
        }


def statistics(job: PageJob, opened: OpenStep, group: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return statistics of tensors; those that the time limit allows, with `partial` if some are missing."""
    job.total = 2 * sum(opened.tensor(group, key).bytes for key in keys)
    rows: list[dict[str, Any]] = []
    partial = False
    with WindowReader(opened, job.advance) as reader:
        for key in keys:
            job.text = key
            try:
                rows.append({"key": key, **_tensor(reader, reader.recipe(group, key))})
            except JobStop:
                if job.is_cancelled:
                    raise
                partial = True
                break
            except HoldfastError as error:
                rows.append({"key": key, "problem": str(error)})
    return {"tensors": rows, "partial": partial}


def _around(value: float) -> tuple[float, float]:
    """Return the ends of a histogram of equal elements."""
    half = max(0.5, abs(value) * 1e-3)
    return value - half, value + half


def _tensor(reader: WindowReader, recipe: Recipe[Place]) -> dict[str, Any]:
    moments = Moments()
    for window in reader.windows(recipe):
        moments.add(as_values(window))
    width = moments.high - moments.low
    if not moments.count or not math.isfinite(width):
        return moments.fields() | {"histogram": None}
    low, high = (moments.low, moments.high) if width else _around(moments.low)
    edges = np.linspace(low, high, _BINS + 1)
    if not np.all(np.diff(edges) > 0):  # closer than the precision of a number
        return moments.fields() | {"histogram": None}
    counts: npt.NDArray[np.int64] = np.zeros(_BINS, np.int64)
    for window in reader.windows(recipe):
        values = as_values(window)
        counts += np.histogram(values[np.isfinite(values)], edges)[0]
    return moments.fields() | {"histogram": {"edges": edges.tolist(), "counts": counts.tolist()}}
