"""The demo's judgments: they say ok for a run that went on, and not for one that did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.demo import story
from holdfast.demo.story import KILLED_AT, STEPS, Story
from holdfast.train.config import parse_config, plan_batches
from holdfast.train.layout import Layout
from holdfast.train.metrics import Metrics
from tests.train.test_plot import has, read_png


def loss(step: int) -> float:
    return 5.0 / step**0.5


def told(folder: Path, *, start: int = KILLED_AT, off: dict[int, float] | None = None, missing: int = 0) -> Story:
    """A story whose runs left the metrics of a run that resumed at `start`, with losses that are off at some steps."""
    made = Story(folder, lambda text: None)
    for name in ("whole", "broken"):
        metrics = Metrics(folder / name / "metrics.jsonl")
        for step in range(1, STEPS + 1):
            error = (off or {}).get(step, 0.0) if name == "broken" else 0.0
            if name == "whole" or step != missing:
                metrics.step(step, loss=loss(step) * (1 + error))
            if name == "broken" and step == start:
                metrics.event("save", step, stall_ms=4.0)
                metrics.event("resumed", step, layout="tp=2 pp=2")
                metrics.event("random streams derived anew", step)
        metrics.close()
    return made


def failed(made: Story) -> list[str]:
    return [finding.text for finding in made.curves_agree() if not finding.good]


def test_a_run_that_went_on_is_good(tmp_path: Path):
    assert failed(told(tmp_path)) == []
    assert failed(told(tmp_path, start=KILLED_AT - story.EVERY)) == []


def test_a_flipped_token_is_no_failure(tmp_path: Path):
    assert failed(told(tmp_path, off={KILLED_AT + 1: 1e-7, STEPS: 0.02})) == []


def test_runs_that_did_not_are_found_out(tmp_path: Path):
    assert (
        "up to step 60 the losses equal those of the uninterrupted run bit for bit"
        in failed(told(tmp_path, off={KILLED_AT: 1e-12}))[0]
    )
    assert (
        "first step on the new layout: relative difference 1.0e-03"
        in failed(told(tmp_path, off={KILLED_AT + 1: 1e-3}))[0]
    )
    assert "all steps: relative difference at most 1.0e-01" in failed(told(tmp_path, off={STEPS: 0.1}))[0]
    assert "no step is missing: 119 of 120" in failed(told(tmp_path, missing=77))[0]
    assert "the run resumed from step 20" in failed(told(tmp_path, start=20))[0]
    assert len(failed(told(tmp_path, start=STEPS + 1))) == 3


def test_damage_is_found(tmp_path: Path):
    made = told(tmp_path)
    holdfast.save(made.checkpoint, {"x": {"a": np.arange(3).tolist()}, "model": _module()})
    assert made.bytes_are_good()[0].good
    file = next(made.checkpoint.glob("model*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert not made.bytes_are_good()[0].good


def _module() -> object:
    import torch

    return torch.nn.Linear(3, 2)


def test_the_picture_shows_both_curves(tmp_path: Path):
    made = told(tmp_path)
    made.draw()
    picture = read_png(tmp_path / "demo.png")
    assert has(picture, (31, 111, 184)) > 500
    assert has(picture, (222, 124, 30)) > 200


@pytest.mark.parametrize("layout", [{}, story.FIRST, story.SECOND])
def test_its_layouts_can_be(layout: dict[str, Any]):
    sets = ["data.path=text.txt", *(f"layout.{axis}={size}" for axis, size in layout.items())]
    config = parse_config(story._CONFIG, sets)
    config.layout.check(Layout(**layout).world, config.model)
    assert plan_batches(config).global_batch == 8


def test_without_transformers_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    finding = told(tmp_path).transformers_opens()[0]
    assert not finding.good
    assert "pip install transformers" in finding.text


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(holdfast.InvalidArgument, match="choose another --out"):
        Story(tmp_path, lambda text: None)
    assert (tmp_path / "thesis.txt").read_text() == "x"
