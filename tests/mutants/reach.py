"""Which tests reach which line of a package: recorded once, by a traced run of the unit tests."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.house.mirror import BESIDE
from tests.mutants.scratch import OUT, REPOSITORY, Scratch

DEADLINE_S = 3600.0
# Beside the mirror: fast, and without ranks or servers.
ALSO = ("props", "golden")


@dataclass(frozen=True, slots=True)
class Reach:
    """The tests of each line, those of the mirror folder first, and the seconds of each test."""

    tests: dict[str, list[str]]
    seconds: dict[str, float]
    mirror: list[str]

    def of(self, file: str, first: int, last: int) -> list[str]:
        """Return the tests that reach any of these lines; for lines run at import, all of the mirror folder."""
        found = {test for line in range(first, last + 1) for test in self.tests.get(f"{file}:{line}", ())}
        chosen = found or set(self.mirror)
        mirrored = set(self.mirror)
        return sorted(chosen, key=lambda test: (test not in mirrored, self.seconds[test], test))


def recorded(package: str, wider: list[str]) -> Reach:
    """Return the reach of the tests, from the last run if neither sources nor tests have changed."""
    folders = [_mirror(package), *(wider or _wider(package))]
    path = (
        OUT / f"{package.replace('/', '.')}-{digest([REPOSITORY / 'src' / 'holdfast', *map(Path, folders)])}.reach.json"
    )
    if not path.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        print(f"recording which tests reach {package}: {', '.join(folders)}", flush=True)
        made = path.with_suffix(".part")
        code, output = Scratch("reach").pytest([*folders, "--maxfail=1000"], DEADLINE_S, MUTANTS_MAP=str(made))
        if code not in (0, 1):
            raise RuntimeError(f"the traced run of the tests ended with {code}: {output[-3000:]}")
        made.rename(path)
    tests: dict[str, list[str]] = defaultdict(list)
    found = json.loads(path.read_text())
    for test, values in found.items():
        for line in values["lines"]:
            tests[line].append(test)
    mirror = [test for test in found if test.startswith(f"{_mirror(package)}/")]
    return Reach(dict(tests), {test: values["seconds"] for test, values in found.items()}, mirror)


def digest(paths: list[Path]) -> str:
    """Return a short digest of the Python files below some folders."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted((REPOSITORY / path).rglob("*.py")):
            total.update(file.read_bytes())
    return total.hexdigest()[:12]


def _mirror(package: str) -> str:
    return f"tests/{package}"


def _wider(package: str) -> list[str]:
    """Return the other folders of the mirror; spmd and the rest of the package do not reach each other."""
    names = sorted(path.name for path in (REPOSITORY / "tests").iterdir() if (path / "__init__.py").exists())
    return [f"tests/{name}" for name in names if name not in {package, "spmd"} and (name not in BESIDE or name in ALSO)]
