"""Warnings that point to the user's own code."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class HoldfastWarning(UserWarning):
    """A condition that a user should know and that does not stop the work."""


def warn(text: str) -> None:
    """Warn at the nearest stack frame outside of Holdfast."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level += 1
        frame = frame.f_back
    warnings.warn(text, HoldfastWarning, stacklevel=level)
