"""One file of torch's tests in a process of its own, begun again behind a test that hangs or crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import holdfast
from tests.torch_tests.record import COLLECTION, Record

INSIDE = Path(__file__).parent / "inside"
POLL_S = 0.3
START_S = 180.0  # to import the file


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the tests are, where results go, and how long a test and a file may take."""

    source: Path  # a checkout's test/distributed
    out: Path
    packages: Path  # what torch's tests import beside torch
    test_s: float
    file_s: float
    only: tuple[str, ...] = ("*",)  # patterns over Class::test

    def record(self, file: str, rules: bool) -> Record:
        return Record(self.out / ("with" if rules else "without") / file.replace("/", "-").replace(".py", ".jsonl"))

    def ranks(self, rules: bool) -> Path:
        return self.out / ("with" if rules else "without") / "ranks"


def run_file(settings: Settings, file: str, rules: bool, go_on: Callable[[Record], bool]) -> None:
    """Run what has no outcome yet. What is left at the deadline, or when `go_on` says no, stays without one."""
    record = settings.record(file, rules)
    if record.has_ended():
        return
    deadline = time.monotonic() + settings.file_s
    while time.monotonic() < deadline and go_on(record):
        before = len(record.outcomes())
        ended = _run(settings, file, rules, record, deadline, go_on)
        outcomes = record.outcomes()
        if COLLECTION in outcomes or (ended and len(outcomes) - before >= record.left()):
            if settings.only == ("*",):
                record.end()
            return
        if ended and len(outcomes) == before:
            log = _log(record).read_text(errors="replace")[-2000:]
            record.add(COLLECTION, "crash", f"pytest ran no test and ended: {log}", 0.0)


def _run(
    settings: Settings, file: str, rules: bool, record: Record, deadline: float, go_on: Callable[[Record], bool]
) -> bool:
    """Run until the process ends, which is True, or a test or the file is past its deadline, or `go_on` says no."""
    with _log(record).open("a") as log:
        process = subprocess.Popen(
            _command(settings, file),
            cwd=_scratch(settings, rules),
            env=_environment(settings, rules, record),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    current: str | None = None
    since = time.monotonic()
    try:
        while process.poll() is None and time.monotonic() < deadline and go_on(record):
            time.sleep(POLL_S)
            if (begun := record.begun()) != current:
                current, since = begun, time.monotonic()
            taken_s = time.monotonic() - since
            if current is not None and taken_s > settings.test_s:
                record.add(current, "hang", f"no end after {taken_s:.0f} s", taken_s)
                return False
            if current is None and taken_s > max(START_S, settings.test_s):
                record.add(COLLECTION, "hang", f"no test began within {taken_s:.0f} s", taken_s)
                return False
        if process.poll() is None:
            return False
        if (begun := record.begun()) is not None:
            record.add(begun, "crash", f"its process ended with {process.returncode}", time.monotonic() - since)
        return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and the ranks that it started: all are of the session that was begun for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended
    finally:
        process.wait()


def _command(settings: Settings, file: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        f"--rootdir={settings.source}",
        f"--config-file={INSIDE / 'pytest.ini'}",
        "-p",
        "torch_tests_plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=short",
        str(settings.source / file),
    ]


def _environment(settings: Settings, rules: bool, record: Record) -> dict[str, str]:
    caches = settings.out / ("with" if rules else "without") / "caches"
    path = [INSIDE, settings.packages, Path(holdfast.__file__).parents[1]]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",  # nothing is written into the checkout
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(settings.test_s * 0.8)),
        "HOLDFAST_TORCH_TESTS_RULES": "1" if rules else "0",
        "HOLDFAST_TORCH_TESTS_RANKS": str(settings.ranks(rules)),
        "HOLDFAST_TORCH_TESTS_ONLY": " ".join(settings.only),
        "HOLDFAST_TORCH_TESTS_RECORD": str(record.path),
    }


def _scratch(settings: Settings, rules: bool) -> Path:
    folder = settings.out / ("with" if rules else "without") / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _log(record: Record) -> Path:
    return record.path.with_suffix(".log")
