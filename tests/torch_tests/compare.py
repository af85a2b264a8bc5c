"""What the two runs of a file say together."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.torch_tests.record import Outcome

EXPECTED = Path(__file__).with_name("expected.toml")


@dataclass(slots=True)
class Comparison:
    """One file's tests, without the rules and with them."""

    file: str
    tests: int
    passed_without: int
    passed_with: int
    expected_failures: int = 0  # of the tests that fail both ways, as torch's tests say they do
    newly_passing: list[str] = field(default_factory=list)
    newly_failing: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)  # newly failing, with a reason in expected.toml


def compare(
    file: str, without: Mapping[str, Outcome], with_rules: Mapping[str, Outcome], reasons: Mapping[str, str]
) -> Comparison:
    """Set the outcomes side by side; a test that ended on one side only counts as failed on the other."""
    found = Comparison(
        file,
        tests=len({*without, *with_rules}),
        passed_without=sum(outcome.is_pass for outcome in without.values()),
        passed_with=sum(outcome.is_pass for outcome in with_rules.values()),
    )
    missing = Outcome("failed", "it did not run", 0.0)
    for test in sorted({*without, *with_rules}):
        before, after = without.get(test, missing), with_rules.get(test, missing)
        if after.is_pass and not before.is_pass:
            found.newly_passing.append(test)
        elif not after.is_pass and (before.is_pass or (after.is_failure and not before.is_failure)):
            name = f"{file}::{test}"
            (found.newly_failing if reason_of(name, reasons) is None else found.listed).append(test)
        elif after.outcome == "xfailed":
            found.expected_failures += 1
    return found


def reason_of(name: str, reasons: Mapping[str, str]) -> str | None:
    """The reason of the pattern that the test's name fits."""
    return next((reason for pattern, reason in reasons.items() if fnmatch.fnmatchcase(name, pattern)), None)


def read_reasons(path: Path = EXPECTED) -> dict[str, str]:
    """Return the reason of each pattern over `file::Class::test`."""
    reasons: dict[str, str] = {}
    for group in tomllib.loads(path.read_text())["group"]:
        for pattern in group["tests"]:
            reasons[pattern] = group["reason"]
    return reasons
