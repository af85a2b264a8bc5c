"""The errors and the warning of holdfast.spmd: one root, few leaves.

Within Holdfast each is also the Holdfast error of its kind, so that `except holdfast.HoldfastError` catches it.
Alone, as a package without the rest of Holdfast, each is only the builtin that a caller would expect.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"

if TYPE_CHECKING:
    from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch, NotFound, Unsupported
    from holdfast.core.warnings import HoldfastWarning
else:
    try:
        from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch, NotFound, Unsupported
        from holdfast.core.warnings import HoldfastWarning
    except ModuleNotFoundError:
        HoldfastError, InvalidArgument, Mismatch = Exception, ValueError, ValueError
        NotFound, Unsupported, HoldfastWarning = FileNotFoundError, TypeError, UserWarning


class SpmdError(HoldfastError):
    """Root of every error that holdfast.spmd raises on purpose."""


class SpmdArgumentError(SpmdError, InvalidArgument):
    """A pattern, a placement, a plan or an option that makes no sense."""


class PlanMismatch(SpmdError, Mismatch):
    """A plan for another mesh or another model."""


class PlanNotFound(SpmdError, NotFound):
    """There is no plan where one was asked for."""


class UnsupportedCall(SpmdError, Unsupported):
    """A call that cannot be run on shards, refused on every rank instead of being guessed at."""


class SpmdWarning(HoldfastWarning):
    """Something that a user should know and that does not stop the work."""


def warn(text: str) -> None:
    """Warn at the nearest line that is not in this package."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level += 1
        frame = frame.f_back
    warnings.warn(text, SpmdWarning, stacklevel=level)
