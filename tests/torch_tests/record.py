"""The outcomes of the tests of one file, kept as JSON lines, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLLECTION = "collection"  # stands for the tests of a file that could not be imported


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended.

    passed, failed, skipped; xfailed: failed, as its expectedFailure says; xpassed: passed in spite of that;
    hang: ran past its deadline; crash: its process died.
    """

    outcome: str
    why: str
    seconds: float

    @property
    def is_pass(self) -> bool:
        return self.outcome in ("passed", "xpassed")

    @property
    def is_failure(self) -> bool:
        return self.outcome in ("failed", "hang", "crash")


class Record:
    """A file of JSON lines that the plugin in the process of the tests appends to."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def add(self, test: str, outcome: str, why: str, seconds: float) -> None:
        line = json.dumps({"test": test, "outcome": outcome, "why": why, "seconds": round(seconds, 2)})
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def outcomes(self) -> dict[str, Outcome]:
        return {
            line["test"]: Outcome(line["outcome"], line["why"], line["seconds"])
            for line in self._lines()
            if "outcome" in line
        }

    def tests(self) -> int:
        """How many tests the file has; 0 before it was imported."""
        return max((line["tests"] for line in self._lines() if "tests" in line), default=0)

    def left(self) -> int:
        """How many tests were to be run when the file was last imported."""
        return next((line["left"] for line in reversed(self._lines()) if "left" in line), 1)

    def begun(self) -> str | None:
        """The test that began and has not ended."""
        last = next((line for line in reversed(self._lines()) if "test" in line), None)
        return None if last is None or "outcome" in last else str(last["test"])

    def end(self) -> None:
        """Write down that every test of the file has its outcome."""
        with self.path.open("a") as file:
            file.write(json.dumps({"ended": True}) + "\n")

    def has_ended(self) -> bool:
        return any("ended" in line for line in self._lines())

    def forget(self, tests: set[str]) -> None:
        """Let these tests run again."""
        kept = [line for line in self._lines() if line.get("test") not in tests and "ended" not in line]
        self.path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]
