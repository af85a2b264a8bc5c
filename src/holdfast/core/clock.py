"""Times of a start: the age of this process, and the seconds of the phases of a load."""

from __future__ import annotations

import os
import time
from pathlib import Path

_START_TICKS = 19  # of /proc/self/stat, after the name of the program


def process_age_s() -> float | None:
    """Return the seconds since this process began; None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (AttributeError, IndexError, OSError, ValueError):
        return None


class PhaseClock:
    """The seconds of phases that follow each other."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End a phase: the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._started
