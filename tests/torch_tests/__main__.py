"""`make torch-tests TORCH_SRC=checkout`: torch's own DTensor tests without and with the rules, as a table.

Results are kept under out/torch-tests as they come: a run that was stopped goes on, and `--again` begins anew. Exit 1
if a test that passes without the rules fails with them, unless tests/torch_tests/expected.toml has the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import queue
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.torch_tests.compare import Comparison, compare, read_reasons, reason_of
from tests.torch_tests.files import FILES
from tests.torch_tests.record import Record
from tests.torch_tests.running import Settings, run_file

OUT = Path("out/torch-tests")


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as an interrupt: the tests' processes are ended first
    console = Console()
    source = arguments.torch_src.resolve() / "test" / "distributed"
    problem = _misfit(arguments.torch_src)
    if problem is not None:
        console.print(f"[red]{problem}")
        return 2
    chosen = [name for name in FILES if any(fnmatch.fnmatchcase(name, f"*{only}*") for only in arguments.files)]
    files = [name for name in chosen if (source / name).exists()]
    if not files:
        console.print(f"[red]no file of {source} is called {', '.join(arguments.files)}")
        return 2
    out = arguments.out.resolve() / torch.__version__.partition("+")[0]
    settings = Settings(
        source, out, arguments.packages.resolve(), arguments.test_s, arguments.file_s, tuple(arguments.tests)
    )
    ways = {"both": (False, True), "with": (True,), "without": (False,)}[arguments.mode]
    if arguments.again:
        for way in ways:
            for file in files:
                settings.record(file, way).path.unlink()
    if arguments.retry:
        _forget_failures(settings, files)
    if not arguments.only_table:
        _run_all(settings, [(file, way) for file in files for way in ways], arguments.jobs, console)
    return _conclude(settings, files, ways, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.torch_tests")
    parser.add_argument("torch_src", type=Path, help="a checkout of torch, of the release that is installed")
    parser.add_argument("--files", nargs="*", default=[""], help="parts of the names of files")
    parser.add_argument("--tests", nargs="*", default=["*"], help="patterns over Class::test")
    parser.add_argument("--mode", choices=("both", "with", "without"), default="both")
    parser.add_argument("--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--test-s", type=float, default=240.0, help="how long a test may take")
    parser.add_argument("--file-s", type=float, default=4 * 3600.0, help="how long a file may take")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--packages", type=Path, default=OUT / "packages", help="has expecttest, which torch's tests need"
    )
    parser.add_argument("--again", action="store_true", help="forget the results of these files")
    parser.add_argument(
        "--retry", action="store_true", help="forget the results of tests that fail with the rules only"
    )
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    return parser.parse_args()


def _misfit(checkout: Path) -> str | None:
    """Say why these tests are not those of the torch that is installed."""
    if not (checkout / "test" / "distributed" / "tensor").is_dir():
        return f"TORCH_SRC={checkout}: there is no test/distributed/tensor; give a checkout of pytorch/pytorch"
    version = checkout / "version.txt"
    if not version.exists():  # a sparse checkout
        return None
    theirs, ours = (re.match(r"\d+\.\d+", text) for text in (version.read_text(), torch.__version__))
    if theirs is None or ours is None or theirs[0] != ours[0]:
        return f"TORCH_SRC is of torch {version.read_text().strip()}, and torch {torch.__version__} is installed"
    return None


def _forget_failures(settings: Settings, files: list[str]) -> None:
    for file in files:
        without, with_rules = settings.record(file, False), settings.record(file, True)
        found = compare(file, without.outcomes(), with_rules.outcomes(), {})
        with_rules.forget({*found.newly_failing, "collection"})


def _run_all(settings: Settings, jobs: list[tuple[str, bool]], at_once: int, console: Console) -> None:
    waiting: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stop = threading.Event()
    with Progress(SpinnerColumn(), *columns, console=console) as progress, ThreadPoolExecutor(at_once) as threads:
        overall = progress.add_task("files", total=len(jobs))

        def work() -> None:
            while not stop.is_set() and not waiting.empty():
                _run_one(settings, *waiting.get(), progress, stop)
                progress.advance(overall)

        workers = [threads.submit(work) for _ in range(at_once)]
        try:
            for worker in workers:
                worker.result()
        finally:
            stop.set()  # of the interrupted run no test stays behind


def _run_one(settings: Settings, file: str, rules: bool, progress: Progress, stop: threading.Event) -> None:
    way = "with" if rules else "without"
    task = progress.add_task(f"{file} {way}", total=None)

    def go_on(record: Record) -> bool:
        progress.update(task, completed=len(record.outcomes()), total=record.tests() or None)
        return not stop.is_set()

    run_file(settings, file, rules, go_on)
    record = settings.record(file, rules)
    passed = sum(outcome.is_pass for outcome in record.outcomes().values())
    progress.console.print(f"{file} {way}: {passed} of {record.tests()} passed", highlight=False)
    progress.remove_task(task)


def _conclude(settings: Settings, files: list[str], ways: tuple[bool, ...], console: Console) -> int:
    """Print the table; 1 if it has what may not be."""
    problems = [
        f"{file} {'with' if way else 'without'}: not every test was run; run this again to go on"
        for file in files
        for way in ways
        if not settings.record(file, way).has_ended()
    ]
    if len(ways) == 2:
        reasons = read_reasons()
        found = [
            compare(file, settings.record(file, False).outcomes(), settings.record(file, True).outcomes(), reasons)
            for file in files
        ]
        console.print(_table(found))
        for one in found:
            for test in one.listed:
                console.print(
                    f"listed: {one.file}::{test}: {reason_of(f'{one.file}::{test}', reasons)}", highlight=False
                )
            problems += [f"passes without the rules, not with them: {one.file}::{test}" for test in one.newly_failing]
    problems += _off_ranks(settings, ways, console)
    for problem in problems:
        console.print(f"[red]not allowed:[/red] {problem}", highlight=False)
    return 1 if problems else 0


def _off_ranks(settings: Settings, ways: tuple[bool, ...], console: Console) -> list[str]:
    """Count the ranks that joined process groups; those with the wrong setting are problems."""
    problems = []
    for way in ways:
        path = settings.ranks(way)
        words = path.read_text().split() if path.exists() else []
        wrong = words.count("off" if way else "on")
        name = "with" if way else "without"
        console.print(
            f"{name} the rules: {len(words)} ranks joined process groups, {wrong} of them not so", highlight=False
        )
        if wrong:
            problems.append(f"{wrong} ranks of the run {name} the rules were not {name} them")
    return problems


def _table(found: list[Comparison]) -> Table:
    table = Table(title=f"torch {torch.__version__}: its own tests, without and with holdfast.spmd")
    table.add_column("file")
    for name in ("tests", "passed without", "passed with", "newly passing", "newly failing", "listed"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(one.file, *map(str, _numbers(one)))
    table.add_section()
    table.add_row("all", *(str(sum(column)) for column in zip(*map(_numbers, found), strict=True)))
    return table


def _numbers(one: Comparison) -> tuple[int, ...]:
    unlisted, listed = len(one.newly_failing), len(one.listed)
    return one.tests, one.passed_without, one.passed_with, len(one.newly_passing), unlisted, listed


if __name__ == "__main__":
    sys.exit(main())
