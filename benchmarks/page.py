"""What `holdfast serve` costs: the time of first views, its memory, and what training beside it feels.

    python -m benchmarks.page --intervals 10          # medians of at least five views and intervals each

Every first view is asked of a new server, over HTTP, and the processor time of the server is measured beside the wall
clock. For training, one run of a tiny model trains and saves; in every other interval a page is open: a server, and a
client that fetches the run and follows its events, as a browser does. So both see the same machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.web import sample_runs

SERVE = "import sys; sys.argv = ['holdfast', 'serve', *sys.argv[1:]]; from holdfast.cli.main import main; main()"
TICK_S = 0.01  # of /proc/PID/stat


class Page:
    """A server as a process, and requests to it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, body[:200]
        return json.loads(body)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def peak_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    def follow(self, run: str, ended: threading.Event) -> None:
        """Read the run's events until the end, as a page does."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("GET", f"/api/runs/{run}/stream")
        answer = connection.getresponse()
        while not ended.is_set() and answer.readline():
            pass
        connection.close()


@contextmanager
def served(root: Path) -> Iterator[Page]:
    """Start `holdfast serve`."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(root)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield Page(process, int(process.stdout.readline().rpartition(":")[2].strip("/\n ")))
    finally:
        process.terminate()
        process.wait(60)


def first_views(name: str, root: Path, rounds: int) -> dict[str, Any]:
    """Median times of the list, the run, a step and the tree, each asked of new servers; and the peak of memory."""
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    peaks = []
    for _ in range(rounds):
        with served(root) as page:

            def timed(what: str, path: str, page: Page = page) -> Any:
                began, used = time.perf_counter(), page.cpu_s()
                found = page.get(path)
                times.setdefault(what, []).append(time.perf_counter() - began)
                cpu.setdefault(what, []).append(page.cpu_s() - used)
                return found

            run = timed("first list of runs", "/api/runs")["runs"][0]["id"]
            folder = timed("run", f"/api/runs/{run}")["steps"]["folder"][-1]
            timed("step", f"/api/runs/{run}/steps/{folder}")
            timed("first tree", f"/api/runs/{run}/steps/{folder}/tree")
            timed(
                "layers", f"/api/runs/{run}/steps/{folder}/tree?prefix=model.layers" if name == "keys" else "/api/about"
            )
            peaks.append(page.peak_mb())
    rows = {
        what: {"wall_s": statistics.median(found), "cpu_s": statistics.median(cpu[what])}
        for what, found in times.items()
    }
    for what, row in rows.items():
        print(f"{name:>8}  {what:<20} {row['wall_s']:7.3f} s wall  {row['cpu_s']:6.2f} s of the processor")
    print(f"{name:>8}  peak of memory       {max(peaks):7.1f} MB", flush=True)
    return {"views": rows, "peak_mb": max(peaks)}


def training(folder: Path, intervals: int, steps: int, every: int) -> dict[str, Any]:
    """Train one run; in every other interval of `steps` steps a page is open."""
    run = folder / "run"
    process = sample_runs.train(run, (2 * intervals + 2) * steps, every)
    began: dict[int, bool] = {}
    try:
        _wait_for(run, steps, process)
        for number in range(2 * intervals):
            is_open = bool(number % 2)
            if is_open:
                with served(run) as page:
                    first = _look(page, run, steps, process)
            else:
                time.sleep(1.0)
                first = sample_runs.last_step(run) + 1
                _wait_for(run, first + steps, process)
            began |= dict.fromkeys(range(first + 1, sample_runs.last_step(run)), is_open)
    finally:
        process.terminate()
        process.wait(120)
    return _figures(run, began)


def _look(page: Page, run: Path, steps: int, process: subprocess.Popen[bytes]) -> int:
    """Open the page, then follow the run for an interval; return the step at its beginning."""
    ended = threading.Event()
    found = page.get("/api/runs")["runs"][0]["id"]
    page.get(f"/api/runs/{found}")
    page.get(f"/api/runs/{found}/metrics?points=2000")
    threading.Thread(target=page.follow, args=(found, ended), daemon=True).start()
    time.sleep(1.0)
    first = sample_runs.last_step(run) + 1
    _wait_for(run, first + steps, process)
    ended.set()
    return first


def _wait_for(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 500
    while sample_runs.last_step(run) < step and process.poll() is None:
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.25)


def _figures(run: Path, began: dict[int, bool]) -> dict[str, Any]:
    step_ms: dict[bool, list[float]] = {False: [], True: []}
    stall_ms: dict[bool, list[float]] = {False: [], True: []}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        is_open = began.get(record.get("step"))
        if is_open is not None and "step_ms" in record:
            step_ms[is_open].append(record["step_ms"])
        if is_open is not None and record.get("event") == "save":
            stall_ms[is_open].append(record["stall_ms"])
    rows = {}
    for is_open in (False, True):
        name = "page open" if is_open else "no page"
        rows[name] = {
            "steps": len(step_ms[is_open]),
            "step_ms": statistics.median(step_ms[is_open]),
            "saves": len(stall_ms[is_open]),
            "stall_ms": statistics.median(stall_ms[is_open]),
        }
        row = rows[name]
        text = f"{row['step_ms']:8.2f} ms a step ({row['steps']})  stall {row['stall_ms']:6.2f} ms ({row['saves']})"
        print(f"training  {name:<10} {text}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="new servers for each kind of root")
    parser.add_argument("--intervals", type=int, default=5, help="intervals of training with a page, and without")
    parser.add_argument("--steps", type=int, default=40, help="steps of an interval")
    parser.add_argument("--every", type=int, default=5, help="steps between saves")
    parser.add_argument("--json", type=Path, default=Path("out/bench_page.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-page-") as name:
        top = Path(name)
        sample_runs.many(top / "many", 1000)
        sample_runs.keys(top / "keys")
        figures = {kind: first_views(kind, top / kind, arguments.rounds) for kind in ("many", "keys")}
        found = {**figures, "training": training(top, arguments.intervals, arguments.steps, arguments.every)}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
