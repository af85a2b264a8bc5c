"""Warnings that point to the user's own code, at once or collected until the end of a call."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
# Between the user's code and an integration; a line of theirs says nothing to the user.
_BETWEEN = frozenset({"accelerate", "contextlib", "lightning", "pytorch_lightning", "torch", "transformers", "trl"})


class HoldfastWarning(UserWarning):
    """A condition that a user should know and that does not stop the work."""


def warn(text: str) -> None:
    """Warn at the nearest stack frame outside of Holdfast and of the frameworks that call it."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame):
        level += 1
        frame = frame.f_back
    warnings.warn(text, HoldfastWarning, stacklevel=level)


def _is_internal(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename.startswith(_PACKAGE) or module.partition(".")[0] in _BETWEEN


class PendingWarnings:
    """Warnings to emit at the end of a call, where the user sees them. Threads may add to them.

    A warning that a filter turns into an error must not leave other ranks waiting, so that none
    is emitted between two collectives.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._added: set[str] = set()

    def add(self, text: str) -> None:
        self._texts.append(text)

    def add_once(self, text: str) -> None:
        """Add a text unless it was added this way before."""
        if text not in self._added:
            self._added.add(text)
            self._texts.append(text)

    def mentions(self, text: str) -> bool:
        """Return True if a warning that was not emitted yet contains the text."""
        return any(text in other for other in self._texts)

    def emit(self) -> None:
        while self._texts:
            warn(self._texts.pop(0))

    def clear(self) -> None:
        self._texts.clear()
