"""The fault table: `python -m tests.faults [--seed N] [--only SUBSTRING]`.

Every module `rows_*.py` beside this one has `ROWS`. Exit 1 if anything was lost, wrong or hung.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import secrets
import sys
import time
import traceback
from collections.abc import Sequence

import tests.faults
from rich.console import Console
from rich.table import Table
from tests.faults.row import WRONG, Row, Tally


def find_rows(only: str = "") -> list[Row]:
    """The rows of every module, those whose fault has `only` in it."""
    names = sorted(module.name for module in pkgutil.iter_modules(tests.faults.__path__))
    modules = [importlib.import_module(f"tests.faults.{name}") for name in names if name.startswith("rows_")]
    rows = [row for module in modules for row in module.ROWS]
    return [row for row in rows if only.lower() in row.fault.lower()]


def print_table(rows: Sequence[Row], seed: int, console: Console) -> bool:
    """Run the rows one after another and print what they came to; whether all survived."""
    table = Table("fault")
    for name in ("injected", "survived", "lost", "wrong", "hung", "seconds", "seed"):
        table.add_column(name, justify="right")
    total, uncounted, seconds = Tally(), 0, 0.0
    good = True
    for row in rows:
        console.print(f"{row.fault} ...", style="dim", markup=False, highlight=False)
        started = time.monotonic()
        tally = _run(row, seed)
        took = time.monotonic() - started
        table.add_row(row.fault, *_cells(tally, took), str(seed), style=None if tally.good else "red")
        good = good and tally.good
        seconds += took
        if row.counted:
            total += tally
        else:
            uncounted += tally.injected
    table.add_section()
    table.add_row(f"counted (and {uncounted} not counted)", *_cells(total, seconds), str(seed))
    console.print(table)
    return good


def _run(row: Row, seed: int) -> Tally:
    """A row that breaks is wrong; the others are run all the same."""
    try:
        return row.run(seed)
    except Exception:  # noqa: BLE001  (told here, and the table ends with exit code 1)
        traceback.print_exc()
        return WRONG


def _cells(tally: Tally, seconds: float) -> list[str]:
    counts = (tally.injected, tally.survived, tally.lost, tally.wrong, tally.hung)
    return [*map(str, counts), f"{seconds:.1f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="does the same again")
    parser.add_argument("--only", default="", help="the rows whose fault has this in it")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    rows = find_rows(options.only)
    if not rows:
        print(f"no row has {options.only!r} in it", file=sys.stderr)
        return 2
    console = Console()
    good = print_table(rows, seed, console if console.is_terminal else Console(width=120))
    if not good:
        print(f"again: python -m tests.faults --seed {seed} --only {options.only!r}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
