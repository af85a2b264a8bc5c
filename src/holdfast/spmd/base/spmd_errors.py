"""The errors and the warning of holdfast.spmd, and `warn`, which points to the user's line.

Within Holdfast each error also derives from the Holdfast error of its kind, so `except holdfast.HoldfastError` catches
it. Without the rest of Holdfast each derives only from the builtin that a caller would expect.
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
    """An invalid pattern, placement, plan or option."""


class PlanMismatch(SpmdError, Mismatch):
    """A plan for another mesh or another model."""


class PlanNotFound(SpmdError, NotFound):
    """No plan at the given place."""


class UnsupportedCall(SpmdError, Unsupported):
    """A call that cannot run on shards and is refused on every rank."""


class SpmdWarning(HoldfastWarning):
    """A condition that the user should know about and that stops nothing."""


def warn(text: str) -> None:
    """Warn at the nearest line outside of this package."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level += 1
        frame = frame.f_back
    warnings.warn(text, SpmdWarning, stacklevel=level)
