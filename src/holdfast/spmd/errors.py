"""The errors and the warning of holdfast.spmd, which imports nothing else of Holdfast: one root, few leaves."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"


class SpmdError(Exception):
    """Root of every error that holdfast.spmd raises on purpose."""


class SpmdArgumentError(SpmdError, ValueError):
    """A pattern, a placement, a plan or an option that makes no sense."""


class PlanMismatch(SpmdError, ValueError):
    """A plan for another mesh or another model."""


class PlanNotFound(SpmdError, FileNotFoundError):
    """There is no plan where one was asked for."""


class UnsupportedCall(SpmdError, TypeError):
    """A call that cannot be run on shards, refused on every rank instead of being guessed at."""


class SpmdWarning(UserWarning):
    """Something that a user should know and that does not stop the work."""


def warn(text: str) -> None:
    """Warn at the nearest line that is not in this package."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level += 1
        frame = frame.f_back
    warnings.warn(text, SpmdWarning, stacklevel=level)
