"""Durations parsed to seconds: numbers, a timedelta, or a string such as "90m", "36h", "2d"."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from holdfast.core.errors import InvalidArgument

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")

Duration = str | float | timedelta


def parse_seconds(duration: Any, what: str) -> float:
    """Return a duration in seconds; `what` names it in the error."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, str):
        match = _TEXT.fullmatch(seconds.strip())
        if match is None:
            raise InvalidArgument(f"{what}: {duration!r} is not a duration: use seconds, or a string like '90m', '36h'")
        seconds = float(match[1]) * _UNITS[match[2]]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e10:
        raise InvalidArgument(f"{what}: {duration!r} is not a positive duration")
    return float(seconds)
