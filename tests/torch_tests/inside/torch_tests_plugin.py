"""A pytest plugin: writes each test's outcome down as it ends, and leaves out the tests whose outcome is known.

A test that ends in the middle (killed, or its process crashed) has a line that it began, and no other.
"""

from __future__ import annotations

import fnmatch
import json
import os
import time
from typing import Any

import pytest

RECORD = "HOLDFAST_TORCH_TESTS_RECORD"  # a file of JSON lines
ONLY = "HOLDFAST_TORCH_TESTS_ONLY"  # patterns over Class::test
# of several reports on one test the last of these counts
OUTCOMES = ("passed", "xpassed", "xfailed", "skipped", "failed")


def pytest_configure(config: pytest.Config) -> None:
    """Register what writes outcomes down."""
    config.pluginmanager.register(_Recorder(os.environ[RECORD]))


class _Recorder:
    def __init__(self, path: str):
        self._path = path
        self._reports: list[tuple[str, str]] = []  # of the test that runs: outcome, why
        self._began = 0.0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        with open(self._path) as file:
            lines = map(json.loads, file)
            known = {line["test"] for line in lines if "outcome" in line}
        only = os.environ[ONLY].split()
        left = [
            item
            for item in items
            if (name := _name(item.nodeid)) not in known and any(fnmatch.fnmatchcase(name, pattern) for pattern in only)
        ]
        self._write({"tests": len(items), "left": len(left)})
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": "collection", "outcome": "failed", "why": _end_of(report), "seconds": 0.0})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._began = time.monotonic()
        self._write({"test": _name(nodeid)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(_judge(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, why = max(self._reports, key=lambda pair: OUTCOMES.index(pair[0]))
        seconds = round(time.monotonic() - self._began, 2)
        self._write({"test": _name(nodeid), "outcome": outcome, "why": why, "seconds": seconds})

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Stop after a failure that makes torch's base class fail the rest of the class unseen."""
        if getattr(getattr(item, "cls", None), "poison_pill", False):
            item.session.shouldstop = "the class is poisoned"

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _judge(report: pytest.TestReport) -> tuple[str, str]:
    why = _end_of(report)
    if hasattr(report, "wasxfail"):
        return ("xfailed" if report.skipped else "xpassed"), str(report.wasxfail)
    if report.failed and "Unexpected success" in why:
        return "xpassed", why
    return report.outcome, why


def _end_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The end of what a report says, where the error stands."""
    return "" if report.longrepr is None else str(report.longrepr)[-6000:]
