"""A pytest plugin of the mutation runs: records which test reaches which line, or runs the tests of a list.

MUTANTS_PACKAGE must be the folder that `holdfast` is imported from. With MUTANTS_MAP the reach of each test is
written there; with MUTANTS_TESTS the tests listed in that file run, and no others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

PACKAGE = os.environ["MUTANTS_PACKAGE"]
MAP = os.environ.get("MUTANTS_MAP", "")
TESTS = os.environ.get("MUTANTS_TESTS", "")
Reach = dict[str, dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    import holdfast

    if not str(holdfast.__file__).startswith(PACKAGE):
        raise pytest.UsageError(
            f"holdfast comes from {holdfast.__file__}, not from {PACKAGE}: nothing would be mutated"
        )
    if MAP:
        config.pluginmanager.register(Recorder(Path(MAP)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if TESTS:
        wanted = {test: number for number, test in enumerate(json.loads(Path(TESTS).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])


class Recorder:
    """Traces the lines of the package that each test runs in this process, and its time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reach: Reach = {}
        self._lines: set[tuple[str, int]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines = set()
        started = time.monotonic()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.monotonic() - started
            lines = sorted(f"{os.path.relpath(file, PACKAGE)}:{line}" for file, line in self._lines)
            self._reach[item.nodeid] = {"seconds": round(seconds, 3), "lines": lines}

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._reach))

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line
