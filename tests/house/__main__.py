"""Print what breaks the rules of the house: `python -m tests.house [CHECK ...]`. The exit code is then 1."""

from __future__ import annotations

import sys
from types import ModuleType

from tests.house import assertions, lengths, mirror, modules, nouns, phrases, proofs

CHECKS = (lengths, nouns, phrases, proofs, mirror, assertions, modules)


def main() -> int:
    """Run every check and print its findings."""
    chosen = sys.argv[1:] or [_name(check) for check in CHECKS]
    unknown = set(chosen) - {_name(check) for check in CHECKS}
    findings = [f"no such check: {name}" for name in sorted(unknown)]
    findings += [finding for check in CHECKS if _name(check) in chosen for finding in check.find()]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def _name(check: ModuleType) -> str:
    return check.__name__.rpartition(".")[2]


if __name__ == "__main__":
    sys.exit(main())
