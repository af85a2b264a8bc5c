"""Print what breaks the rules of the house: `python -m tests.house`. The exit code is 1 if anything does."""

from __future__ import annotations

import sys

from tests.house import lengths, nouns, phrases


def main() -> int:
    """Run every check and print its findings."""
    findings = [*lengths.find(), *nouns.find(), *phrases.find()]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
