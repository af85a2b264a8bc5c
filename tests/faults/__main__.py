"""The fault table: `python -m tests.faults [--seed N] [--only SUBSTRING] [--jobs N]`.

Every module `rows_*.py` beside this one has `ROWS`. Rows are run side by side, each in one of a
few processes. Exit 1 if anything was lost, wrong or hung.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

import tests.faults
from tests.faults.row import WRONG, Row, Tally


def find_rows(only: str = "") -> list[Row]:
    """The rows of every module, those whose fault has `only` in it."""
    names = sorted(module.name for module in pkgutil.iter_modules(tests.faults.__path__))
    modules = [importlib.import_module(f"tests.faults.{name}") for name in names if name.startswith("rows_")]
    rows = [row for module in modules for row in module.ROWS]
    return [row for row in rows if only.lower() in row.fault.lower()]


def print_table(rows: Sequence[Row], seed: int, console: Console, jobs: int = 1) -> bool:
    """Run the rows and print what they came to; whether all survived."""
    table = Table("fault")
    for name in ("injected", "survived", "lost", "wrong", "hung", "seconds", "seed"):
        table.add_column(name, justify="right")
    total, uncounted = Tally(), 0
    good = True
    started = time.monotonic()
    for row, (tally, took) in zip(rows, _run_all(rows, seed, console, jobs), strict=True):
        table.add_row(row.fault, *_cells(tally, took), str(seed), style=None if tally.good else "red")
        good = good and tally.good
        if row.counted:
            total += tally
        else:
            uncounted += tally.injected
    table.add_section()
    table.add_row(f"counted (and {uncounted} not counted)", *_cells(total, time.monotonic() - started), str(seed))
    console.print(table)
    return good


def _run_all(rows: Sequence[Row], seed: int, console: Console, jobs: int) -> list[tuple[Tally, float]]:
    """What each row came to and how long it took; a line for each one that is over."""
    if jobs == 1:
        return [_told(console, row, _run(row, seed)) for row in rows]
    waiting = list(rows)
    answers: dict[str, tuple[Tally, float]] = {}

    def work() -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.faults", "--seed", str(seed), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            while waiting:
                row = waiting.pop(0)
                print(row.fault, file=worker.stdin, flush=True)
                counts, took = json.loads(worker.stdout.readline() or "[null, 0]")
                answers[row.fault] = _told(console, row, (Tally(**counts) if counts else WRONG, took))
            worker.stdin.close()

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
    return [answers[row.fault] for row in rows]


def serve(seed: int) -> None:
    """Run the rows whose names come in, one on a line, and say what each came to."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what rows print is not an answer
    known = {row.fault: row for row in find_rows()}
    for line in sys.stdin:
        tally, took = _run(known[line.rstrip("\n")], seed)
        print(json.dumps([asdict(tally), took]), file=answers, flush=True)


def _told(console: Console, row: Row, answer: tuple[Tally, float]) -> tuple[Tally, float]:
    tally, took = answer
    console.print(f"{row.fault}: {tally.survived} of {tally.injected}, {took:.0f} s", markup=False, highlight=False)
    return answer


def _run(row: Row, seed: int) -> tuple[Tally, float]:
    """A row that breaks is wrong; the others are run all the same."""
    started = time.monotonic()
    try:
        tally = row.run(seed)
    except Exception:  # noqa: BLE001  (told here, and the table ends with exit code 1)
        traceback.print_exc()
        tally = WRONG
    return tally, time.monotonic() - started


def _cells(tally: Tally, seconds: float) -> list[str]:
    counts = (tally.injected, tally.survived, tally.lost, tally.wrong, tally.hung)
    return [*map(str, counts), f"{seconds:.1f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="does the same again")
    parser.add_argument("--only", default="", help="the rows whose fault has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="rows at a time, as many as cores")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.seed)
        return 0
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    rows = find_rows(options.only)
    if not rows:
        print(f"no row has {options.only!r} in it", file=sys.stderr)
        return 2
    console = Console()
    good = print_table(rows, seed, console if console.is_terminal else Console(width=120), options.jobs)
    if not good:
        print(f"again: python -m tests.faults --seed {seed} --only {options.only!r}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
