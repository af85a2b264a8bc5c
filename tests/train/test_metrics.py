"""Metrics survive a kill, and the last word on a step counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast
from holdfast.train.metrics import Metrics, read_metrics
from holdfast.train.plot import plot_metrics


def test_steps_and_events(tmp_path: Path):
    metrics = Metrics(tmp_path / "deep" / "m.jsonl")
    metrics.step(1, loss=2.5, lr=0.1)
    metrics.event("save", 1, stall_ms=3.0)
    metrics.step(2, loss=2.0)
    metrics.close()
    metrics.step(3, loss=1.0)
    steps, events = read_metrics(tmp_path / "deep" / "m.jsonl")
    assert steps == [{"step": 1, "loss": 2.5, "lr": 0.1}, {"step": 2, "loss": 2.0}]
    assert [(event["event"], event["step"], event["stall_ms"]) for event in events] == [("save", 1, 3.0)]
    lines = (tmp_path / "deep" / "m.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


def test_a_killed_run_is_taken_up(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    metrics = Metrics(path)
    metrics.step(2, loss=2.25)
    metrics.step(3, loss=1.5)
    metrics.close()
    steps, _ = read_metrics(path)
    assert [(record["step"], record["loss"]) for record in steps] == [(1, 3), (2, 2.25), (3, 1.5)]


def test_what_is_not_finite_is_null_and_the_line_is_still_json(tmp_path: Path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.step(1, loss=float("nan"), gradient_norm=float("inf"))
    metrics.event("evaluated", 1, loss=float("nan"))
    metrics.step(2, loss=1.0)
    metrics.close()
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    steps, _ = read_metrics(tmp_path / "m.jsonl")
    assert steps[0] == {"step": 1, "loss": None, "gradient_norm": None}
    plot_metrics(tmp_path / "m.jsonl", tmp_path / "m.png")
    assert (tmp_path / "m.png").exists()


def test_without_a_path_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    opened: list[object] = []
    monkeypatch.setattr("holdfast.train.metrics._open_for_append", opened.append)
    metrics = Metrics(None)
    metrics.step(1, loss=1.0)
    metrics.event("save", 1)
    metrics.close()
    assert opened == [] and list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(holdfast.StorageError, match="file"):
        Metrics(tmp_path / "file" / "m.jsonl").step(1, loss=1.0)


@pytest.mark.parametrize("tail", [b"\0" * 500, b'{"step": 3, "lo', b"\xff\xfe\x80\n", b"[1]\n"])
def test_what_a_power_loss_left_of_the_last_line_is_passed_over(tmp_path: Path, tail: bytes):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + tail)
    metrics = Metrics(path)
    metrics.step(2, loss=1.0)
    metrics.close()
    assert [step["step"] for step in read_metrics(path)[0]] == [1, 2]
