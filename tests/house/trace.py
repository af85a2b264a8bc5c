"""Count the Holdfast modules that a save or a load enters: `python -m tests.house.trace [--modules]`.

A module counts if one of its functions runs in the trainer's process, on any thread. Imports do
not count: everything runs once before it is traced.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import holdfast

LIMITS = {"blocking save": 30, "load": 30, "first background save": 40}
_PACKAGE = f"{Path(holdfast.__file__).resolve().parent}{os.sep}"


@contextmanager
def traced_modules() -> Iterator[dict[str, set[str]]]:
    """Collect the functions that run inside of the block, by module."""
    entered: dict[str, set[str]] = {}

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name != "<module>":
            module = code.co_filename.removeprefix(_PACKAGE).removesuffix(".py")
            entered.setdefault(module, set()).add(code.co_qualname)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def toy_state() -> dict[str, Any]:
    """Return a model of one layer; an optimizer adds about four modules to each operation."""
    return {"model": torch.nn.Linear(8, 4)}


def measure() -> dict[str, dict[str, set[str]]]:
    """Return the functions that each operation enters, by module."""
    state = toy_state()
    with tempfile.TemporaryDirectory(prefix="holdfast-trace-") as name:
        folder = Path(name)
        runs = [holdfast.Checkpointer(folder / f"run-{turn}") for turn in range(2)]
        operations: dict[str, Callable[[int], object]] = {
            "blocking save": lambda turn: holdfast.save(folder / f"saved-{turn}", state),
            "load": lambda turn: holdfast.load(folder / "saved-0", state),
            "first background save": lambda turn: runs[turn].save(1, state).wait(120),
        }
        found = {}
        for what, work in operations.items():
            work(0)
            with traced_modules() as found[what]:
                work(1)
        for run in runs:
            run.close()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", action="store_true", help="print the modules, with the number of their functions")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found = measure()
    for what, modules in found.items():
        functions = sum(map(len, modules.values()))
        print(f"{what:22} {len(modules):3} modules (limit {LIMITS[what]}), {functions} functions")
        if arguments.modules:
            for module, names in sorted(modules.items()):
                print(f"    {module:40} {len(names)}")
    return int(any(len(modules) > LIMITS[what] for what, modules in found.items()))


if __name__ == "__main__":
    sys.exit(main())
