"""What became of each mutant, as JSON lines so that a stopped run goes on; and the survivors that are explained."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.mutations import Mutation

EXPLAINED = Path(__file__).with_name("explained.toml")
KILLED, TIMEOUT, SURVIVED, UNREACHED = "killed", "timeout", "survived", "unreached"


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant: what changed, and how it ended."""

    mutation: Mutation
    outcome: str
    seconds: float
    tests: int

    @property
    def alive(self) -> bool:
        """Whether no test noticed the change."""
        return self.outcome in (SURVIVED, UNREACHED)


class Record:
    """A file of results, a line each; the last line of a mutant counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results = {result.mutation: result for result in self._read()}

    def add(self, result: Result) -> None:
        """Append a result."""
        self.results[result.mutation] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def _read(self) -> Iterator[Result]:
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                fields = json.loads(line)
            except ValueError:
                continue  # the run was stopped while it wrote this line
            yield Result(Mutation(**fields.pop("mutation")), **fields)


def explanation(mutation: Mutation) -> str:
    """Return why a survivor is no gap of the tests, "" if nobody says so."""
    for entry in tomllib.loads(EXPLAINED.read_text()).get("survivor", []):
        same = all(entry[name] == getattr(mutation, name) for name in ("file", "scope", "before", "after"))
        if same:
            return str(entry["reason"])
    return ""
