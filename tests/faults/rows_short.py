"""Short reads and writes and interrupted calls: no byte is lost, none is written twice.

By a library that is preloaded into the writer, and into a process that reads; where there is no
C compiler, by functions that stand in for those of `os` in this process.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.core.names import step_folder
from tests.faults.cases import (
    BLOCK_BYTES,
    DEADLINE_S,
    Lost,
    begin_again,
    chance,
    check_root,
    check_stored,
    fresh_root,
    run_cases,
    state_of,
)
from tests.faults.row import Row, Tally

_SOURCE = Path(__file__).with_name("short.c")
_READ = """
import hashlib, sys, holdfast
from holdfast.storage.local import LocalStorage
from pathlib import Path
from holdfast.checkpoint.checkpoint import Checkpoint
path = Path(sys.argv[1])
checkpoint = Checkpoint(LocalStorage(path.parent, mappable=False), path.name)
assert checkpoint.verify().good
print(hashlib.sha256(b"".join(checkpoint.read(key, "w").tobytes() for key in checkpoint.keys("w"))).hexdigest())
"""


@functools.cache
def library() -> Path | None:
    """The library that is preloaded, made once for this process; None if it cannot be made."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or multiprocessing.parent_process() is not None:
        return None
    folder = tempfile.mkdtemp(prefix="holdfast-short-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder) / "short.so"
    done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(_SOURCE), "-ldl"], check=False)
    return made if done.returncode == 0 else None


def settings(path: Path, most: int, every: int) -> dict[str, str]:
    preload = {"LD_PRELOAD": str(library())} if library() else {}
    return {**preload, "SHORT_PATH": str(path), "SHORT_BYTES": str(most), "SHORT_EINTR": str(every)}


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def write_short(most: int, every: int) -> None:
    """A writer whose calls do less than they are asked for; the same step is saved again, too."""
    with fresh_root() as root:
        with environment(settings(root, most, every)):
            checkpointer = holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES)
            with checkpointer:
                checkpointer.save(1, state_of(1)).result(DEADLINE_S)
                checkpointer.save(1, state_of(2)).result(DEADLINE_S)
        check_root(root, {1: {2.0}})
        begin_again(root, {1: {2.0}})


def read_short(path: Path, expected: str, most: int, every: int) -> None:
    """A reader whose calls give less than they are asked for."""
    command = [sys.executable, "-c", _READ, str(path)]
    with environment(settings(path, most, every)):
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode or done.stdout.strip() != expected:
        raise Lost(f"read {done.stdout.strip()!r}: {done.stderr[-500:]}")


def cut_in_python(most: int) -> None:
    """Without a compiler: `os.pwritev` and `os.preadv` of this process take one piece of one buffer at a time."""
    real: dict[str, Callable[..., int]] = {name: getattr(os, name) for name in ("pwritev", "preadv")}

    def cut(name: str, descriptor: int, buffers: Any, offset: int) -> int:
        return real[name](descriptor, [memoryview(buffers[0]).cast("B")[:most]], offset)

    with fresh_root() as root:
        path = root / step_folder(1)
        try:
            for name in real:
                setattr(os, name, partial(cut, name))
            check_stored(holdfast.save(path, state_of(1), step=1, block_bytes=BLOCK_BYTES), [1.0])
        finally:
            for name, function in real.items():
                setattr(os, name, function)


def short_calls(seed: int, count: int = 16) -> Tally:
    random = chance(seed, SHORT)
    sizes = [1, 7, 4095, 4097, *(random.randrange(2, 9000) for _ in range(count - 4))][:count]
    if library() is None:
        return run_cases(SHORT, seed, [(f"{most} bytes at most", partial(cut_in_python, most)) for most in sizes])
    pairs = [(most, random.choice([0, 2, 3, 5])) for most in sizes] + [(0, 2), (0, 3)][: count // 4]
    cases = [
        (f"writes of {most} bytes, interrupted {every}", partial(write_short, most, every)) for most, every in pairs
    ]
    with fresh_root() as root:
        path = root / step_folder(1)
        holdfast.save(path, state_of(1), step=1, block_bytes=BLOCK_BYTES)
        expected = subprocess.run([sys.executable, "-c", _READ, str(path)], check=True, capture_output=True, text=True)
        reading = partial(read_short, path, expected.stdout.strip())
        cases += [
            (f"reads of {most} bytes, interrupted {every}", partial(reading, most, every)) for most, every in pairs
        ]
        return run_cases(SHORT, seed, cases)


SHORT = "short reads and writes, EINTR" + ("" if library() else " (stood in for in Python: no C compiler here)")
ROWS = (Row(SHORT, short_calls),)
