"""Warnings that point to the user's own line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


class HoldfastWarning(UserWarning):
    """Something that a user should know and that does not stop the work."""


def warn(text: str) -> None:
    """Warn at the nearest line that is not Holdfast's."""
    level = 1
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level += 1
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    warnings.warn(text, HoldfastWarning, stacklevel=level)
