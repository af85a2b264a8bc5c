"""strace on a process that already runs: what it calls, and a signal at the k-th of a call."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CALLS = (
    "openat", "close", "mkdir", "mkdirat", "fallocate", "ftruncate", "pwritev", "pwritev2", "pwrite64", "write",
    "fsync", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "flock", "getdents64", "sendto",
    "sync_file_range", "preadv", "newfstatat",
)  # fmt: skip
_LINE = re.compile(r"(?P<thread>\d+) +(?P<call>\w+)\((?P<arguments>.*)\) += +(?P<result>-?\d+|\?)")
_ATTACH_S = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """One system call of a trace."""

    thread: int
    name: str
    arguments: str


@contextmanager
def attached(process: int, *expressions: str) -> Iterator[list[Call]]:
    """Trace a process and its threads until the end of the context; the list is filled then."""
    calls: list[Call] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-strace-") as folder:
        output = Path(folder) / "trace"
        options = [option for text in expressions for option in ("-e", text)]
        command = ["strace", "-f", "-qq", "-y", "-o", str(output), *options]
        with subprocess.Popen([*command, "-p", str(process)], stderr=subprocess.PIPE, text=True) as tracer:
            try:
                _wait_until_traced(process, tracer)
                yield calls
            finally:
                tracer.terminate()
                tracer.wait(_ATTACH_S)
                calls += parse(output.read_text(errors="replace"))


def _wait_until_traced(process: int, tracer: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _ATTACH_S
    while not all(_tracer_of(thread) == tracer.pid for thread in Path(f"/proc/{process}/task").iterdir()):
        if tracer.poll() is not None or time.monotonic() > end:
            tracer.kill()
            raise OSError(f"strace cannot attach: {tracer.communicate()[1].strip()}")
        time.sleep(0.002)


def _tracer_of(task: Path) -> int:
    try:
        status = (task / "status").read_text()
    except OSError:
        return -1
    return int(status.partition("TracerPid:")[2].split()[0])


def parse(text: str) -> Iterator[Call]:
    """The calls of a trace in the order of their ends: calls that were cut in two are put together."""
    begun: dict[str, str] = {}
    for line in text.splitlines():
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"\d+ +<\.\.\. \w+ resumed>", line)
        match = _LINE.match(begun.pop(thread, "") + line[resumed.end() :] if resumed else line)
        if match is not None and not match["result"].startswith("-"):
            yield Call(int(match["thread"]), match["call"], match["arguments"])


def places(calls: list[Call]) -> list[tuple[str, int]]:
    """Every (call, k) at which a signal can strike; strace counts each call and thread by itself."""
    by_thread = Counter((call.thread, call.name) for call in calls)
    most: dict[str, int] = {}
    for (_, name), count in by_thread.items():
        most[name] = max(most.get(name, 0), count)
    return [(name, k) for name in sorted(most) for k in range(1, most[name] + 1)]


@functools.cache
def problem() -> str:
    """Why strace cannot be used here; empty if it can. Ranks and victims do not try it."""
    if multiprocessing.parent_process() is not None:
        return ""
    if shutil.which("strace") is None:
        return "there is no strace here"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            with attached(child.pid, "trace=close", "inject=close:signal=SIGKILL:when=60000"):
                return ""
        except OSError as error:
            return str(error)
        finally:
            os.kill(child.pid, 9)
