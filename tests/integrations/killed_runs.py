"""A run that is killed and resumed beside one that never stops; imports no framework, so that the parent need not."""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integrations.launcher import Launcher

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def call(module: str, name: str, *arguments: Any) -> Any:
    """Call a function of a module that only the ranks import."""
    return getattr(importlib.import_module(module), name)(*arguments)


@dataclass(frozen=True, slots=True)
class Killed:
    """A scenario: a function that trains, its arguments, and the steps after which it may be killed."""

    module: str
    function: str
    world: int = 1
    arguments: tuple[Any, ...] = ()
    first: int = 5
    last: int = 13
    wholes: dict[str, Any] = field(default_factory=dict)  # of the run that never stops, once it ran

    def run_whole(self, launcher: Launcher, folder: Path) -> list[dict[str, Any]]:
        """Return what each rank reports of the run that never stops; it runs once."""
        if "whole" not in self.wholes:
            given = (self.module, self.function, str(folder / "whole"), *self.arguments)
            self.wholes["whole"] = launcher.values(self.world, call, *given, environment=ENVIRONMENT)
        found: list[dict[str, Any]] = self.wholes["whole"]
        return found

    def kill_and_resume(self, launcher: Launcher, folder: Path, seed: int) -> list[dict[str, Any]]:
        """Kill all ranks at a random step and time, start again, and return what each rank reports."""
        drawn = random.Random(seed)
        step, after_s = drawn.randint(self.first, self.last), drawn.uniform(0.0, 0.3)
        killed = folder / f"killed-{seed}"
        given = (self.module, self.function, str(killed), *self.arguments)
        outcomes = launcher.run(
            self.world, call, *given, step, environment=ENVIRONMENT, kill_file=killed / "kill", after_s=after_s
        )
        assert all(outcome.killed for outcome in outcomes), [outcome.error for outcome in outcomes]
        return launcher.values(self.world, call, *given, environment=ENVIRONMENT)


def require_same_run(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Assert that on every rank a run that was killed and resumed is the run that never stopped."""
    for one, other in zip(whole, resumed, strict=True):
        assert other["first"], "nothing was resumed"
        assert other["trained"] == [batch for batch in one["trained"] if batch[0] >= other["first"]]
        assert other["log"] == one["log"]
        assert {**other, "trained": 0, "first": 0} == {**one, "trained": 0, "first": 0}
