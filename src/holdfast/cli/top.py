"""`holdfast top`: monitor the save in flight, its speed, and the committed steps of a run."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import click

from holdfast.checkpoint.catalog import Committed, committed_steps
from holdfast.cli.render import clean, count, live, print_json, size_text
from holdfast.core.errors import NotFound
from holdfast.storage import is_checkpoint, shared_storage_at
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.writer.in_flight import InFlight, saves_in_flight

_SHOWN = 8
_BAR = 30


@click.command("top", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.option("--interval", type=click.FloatRange(0.1), default=0.5, show_default=True, help="Seconds between updates.")
@click.option("--once", is_flag=True, help="Print the state once and exit; implied unless stdout is a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the state once as JSON.")
def command(root: str, interval: float, once: bool, as_json: bool) -> None:
    """Monitor the run under ROOT: the save in flight and the committed steps.

    Works on any host that can read ROOT, without contact to the run: only the writers' notes
    under ROOT are read. Waits for a ROOT that does not exist yet. Ctrl-C exits.

    \b
    holdfast top runs/llama
    holdfast top runs/llama --once      print the state once, for a script
    """
    is_live = not (once or as_json) and sys.stdout.isatty()
    storage = shared_storage_at(root)
    if isinstance(storage, LocalStorage) and storage.root.is_file():
        raise NotFound(f"{root} is a file; give the folder that a Checkpointer saves to")
    if is_checkpoint(storage):
        raise NotFound(f"{root} is a checkpoint; give the root that contains it")
    if not storage.exists() and not is_live:
        raise NotFound(f"{root}: no such folder")
    if as_json:
        print_json(_fields(storage))
        return
    monitor = RunMonitor(storage)
    if not is_live:
        click.echo(monitor.text())
        return
    live(monitor.text, interval)


class RunMonitor:
    """Describes the state of a root, and measures the speed of the save in flight between calls."""

    def __init__(self, storage: SharedStorage) -> None:
        self._storage = storage
        self._before: dict[str, tuple[int, float]] = {}

    def text(self) -> str:
        """Return the current state as lines of text."""
        if not self._storage.exists():
            return f"{clean(self._storage.name)}   waiting for the first save"
        flights = saves_in_flight(self._storage)
        committed = committed_steps(self._storage)
        lines = [f"{clean(self._storage.name)}   {count(len(committed), 'checkpoint')}", ""]
        lines += [self._flight(flight) for flight in flights] or ["no save in flight"]
        lines += ["", "committed", *(_committed(entry) for entry in reversed(committed[-_SHOWN:]))]
        return "\n".join(lines)

    def _flight(self, flight: InFlight) -> str:
        now = time.monotonic()
        written, since = self._before.setdefault(flight.attempt, (flight.written, now))
        rate = (flight.written - written) / (now - since) if now > since else 0.0
        share = flight.written / flight.total if flight.total else 0.0
        bar = "#" * round(share * _BAR)
        speed = f"{size_text(rate)}/s  " if rate else ""
        return (
            f"saving step {flight.step}  [{bar:<{_BAR}}] {share:4.0%}  "
            f"{size_text(flight.written)} of {size_text(flight.total)}  {speed}"
            f"{flight.reported} of {count(flight.world, 'writer')} done; {clean(flight.phase)}"
        )


def _committed(entry: Committed) -> str:
    if entry.manifest is None:
        return f"{entry.step:>10}  {entry.problem_label}: {clean(entry.problem)}"
    seconds = entry.manifest.writer.get("seconds")
    took = f"in {seconds:.2f} s" if isinstance(seconds, int | float) else ""
    return f"{entry.step:>10}  {size_text(entry.manifest.total_bytes):>10}  {clean(entry.manifest.created)}  {took}"


def _fields(storage: SharedStorage) -> dict[str, Any]:
    committed = committed_steps(storage)
    return {
        "in_flight": [asdict(flight) for flight in saves_in_flight(storage)],
        "committed": [
            {
                "step": entry.step,
                "good": entry.manifest is not None,
                "bytes": entry.manifest.total_bytes if entry.manifest else None,
                "created": entry.manifest.created if entry.manifest else None,
                "seconds": entry.manifest.writer.get("seconds") if entry.manifest else None,
            }
            for entry in committed
        ],
    }
