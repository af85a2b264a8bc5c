"""`holdfast serve` as a process, for a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START_S = 60.0


class Served:
    """A running server and its address."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def get(self, path: str) -> Any:
        """Return an answer of the API."""
        with urllib.request.urlopen(self.address.rstrip("/") + path, timeout=30) as response:
            return json.load(response)

    def run_id(self, name: str) -> str:
        """Return the id of the run of a name."""
        return next(run["id"] for run in self.get("/api/runs")["runs"] if run["name"] == name)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=20)
        if self.process.stdout is not None:
            self.process.stdout.close()


def start(
    *roots: Path | str, port: int = 0, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Served:
    """Start a server and return when it listens."""
    command = [sys.executable, "-m", "holdfast", "serve", *map(str, roots), "--port", str(port), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        process.kill()
        raise AssertionError(f"the server did not start: {line!r}")
    return Served(process, found.group())


@contextmanager
def served(*roots: Path | str, **options: Any) -> Iterator[Served]:
    """Serve roots for the time of a block."""
    server = start(*roots, **options)
    try:
        yield server
    finally:
        server.stop()


def eventually(what: Any, *, within_s: float = 60.0) -> None:
    """Wait until `what()` is true."""
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, f"not within {within_s:.0f} s"
        time.sleep(0.1)
