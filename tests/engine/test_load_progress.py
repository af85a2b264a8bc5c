"""A restart reports its phases as events, and shows its progress on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest
import torch

import holdfast
from holdfast.core.events import Event
from holdfast.engine import load_progress, start_run


def run_with_a_step(root) -> dict[str, torch.Tensor]:
    weights = {"w": torch.arange(100_000.0)}
    with holdfast.Checkpointer(root) as run:
        run.save(3, {"weights": weights}).result()
    return weights


def test_every_phase_is_an_event_with_its_seconds(tmp_path, monkeypatch):
    weights = run_with_a_step(tmp_path)
    monkeypatch.setattr(start_run, "_IMPORTED_S", [1.5])
    monkeypatch.setattr(load_progress, "_EVENT_S", 0.0)
    events: list[Event] = []
    with holdfast.Checkpointer(tmp_path, on_event=events.append) as run:
        before = time.perf_counter()
        assert run.restore({"weights": weights}) == 3
        took = time.perf_counter() - before
        assert run.restore({"weights": weights}) == 3
    names = [event.name for event in events if event.name != "cleaned"]
    first, second = names[: names.index("restored") + 1], names[names.index("restored") + 1 :]
    assert [name for name in first if name != "reading"] == [
        "imported",
        "load planned",
        "read",
        "discovered",
        "restored",
    ]
    assert "imported" not in second and "reading" in first
    by_name = {event.name: event for event in reversed(events)}
    assert by_name["imported"].seconds == 1.5
    assert by_name["read"].bytes >= 400_000 and by_name["reading"].detail.endswith("% of this rank's bytes")
    assert by_name["restored"].step == by_name["load planned"].step == 3
    parts = sum(by_name[name].seconds for name in ("discovered", "load planned", "read"))
    assert 0 < parts <= by_name["restored"].seconds * 1.001 <= took * 1.001


def test_a_root_without_steps_is_discovered_too(tmp_path):
    events: list[Event] = []
    with holdfast.Checkpointer(tmp_path, on_event=events.append) as run:
        assert run.restore({"weights": {"w": torch.zeros(3)}}) is None
    assert "discovered" in [event.name for event in events] and "restored" not in [event.name for event in events]


def test_the_report_has_the_seconds_of_the_phases(tmp_path):
    holdfast.save(tmp_path / "one", {"w": torch.ones(5)})
    report = holdfast.load(tmp_path / "one", {"w": torch.zeros(5)})
    assert list(report.phases) == ["plan", "read", "place"]
    assert sum(report.phases.values()) <= report.seconds


SCRIPT = """
import sys, torch, holdfast
from holdfast.core import terminal
terminal._SHOWN_BYTES = 1
holdfast.load(sys.argv[1], {"w": torch.zeros(5)}, **eval(sys.argv[2]))
"""


@pytest.mark.sliced(2)
@pytest.mark.parametrize(("options", "shown"), [("{}", True), ("{'progress': lambda size: None}", False)])
def test_a_terminal_shows_a_bar(tmp_path, options, shown):
    holdfast.save(tmp_path / "one", {"w": torch.ones(5)})
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "one"), options]
    subprocess.run(command, stderr=theirs, env=environment, check=True, timeout=120)
    os.close(theirs)
    text = b""
    while True:
        try:
            text += os.read(ours, 1 << 16)
        except OSError:  # everything is read
            break
    os.close(ours)
    assert (b"loading one" in text) == shown, text
