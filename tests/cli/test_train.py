"""`holdfast train`: checks before it starts, trains, resumes, and starts ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.train import _notice
from holdfast.core.errors import InvalidArgument
from tests.cli.calls import call

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "train", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


def test_help_teaches():
    out = call("train", "--help").stdout
    for word in ("[layout]", "dp_replicate", "--set", "--nproc", "torchrun", "killed run resumes"):
        assert word in out


def test_what_cannot_be_is_refused_before_anything_starts():
    dense = EXAMPLES / "dense-tiny.toml"
    for options in (("--check",), (), ("--nproc", "3")):
        wrong = call("train", dense, "--set", "layout.tp=3", *options)
        assert isinstance(wrong.exception, InvalidArgument)
        assert "4 attention heads are not divisible by tp=3" in str(wrong.exception)
    alone = call("train", EXAMPLES / "moe-tiny.toml")
    assert isinstance(alone.exception, InvalidArgument)
    assert "needs 4 ranks, but this is a single process; use --nproc 4" in str(alone.exception)
    typo = call("train", dense, "--set", "train.stepps=3")
    assert isinstance(typo.exception, InvalidArgument)
    assert "did you mean steps?" in str(typo.exception)


def test_what_is_refused_has_no_traceback():
    wrong = train(str(EXAMPLES / "dense-tiny.toml"), "--set", "layout.tp=3", "--nproc", "3", "--check")
    assert wrong.returncode == 2
    assert "4 attention heads are not divisible by tp=3" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("evaluated", {"loss": 2.5, "tokens": 9}, "step 7  evaluation loss 2.5000"),
        ("evaluated", {"loss": 2.5, "ema_loss": 2.25}, "step 7  evaluation loss 2.5000, of the average 2.2500"),
        ("failed", {"seconds": 0.0, "detail": "disk\x1b full"}, "step 7  NOT SAVED: disk\\x1b full"),
        ("skipped", {"seconds": 0.0, "detail": "busy"}, "step 7  save skipped: busy"),
        ("resumed", {"layout": "tp=2"}, ""),
    ],
)
def test_lines_about_evaluations_and_saves(name, values, text):
    assert _notice(name, 7, values) == text


@pytest.mark.full
@pytest.mark.timeout(500)
def test_trains_on_two_ranks_and_goes_on_with_one(tmp_path: Path):
    few = ["--set", f"train.folder={tmp_path}", "--set", "data.evaluation_samples=4"]
    two = ["--set", "layout.tp=2", "--nproc", "2"]
    first = train(
        str(EXAMPLES / "dense-tiny.toml"),
        *few,
        "--set",
        "train.steps=3",
        "--set",
        "train.evaluate_every=0",
        *two,
        "--json",
    )
    assert first.returncode == 0, first.stderr
    *steps, outcome = (json.loads(line) for line in first.stdout.splitlines())
    assert [(step["step"], step["consumed_samples"]) for step in steps] == [(1, 16), (2, 32), (3, 48)]
    assert outcome == {"outcome": {"step": 3, "resumed_from": 0, "preempted": False}}
    evaluated = ["--set", "train.evaluate_every=4"]
    second = train(str(EXAMPLES / "dense-tiny.toml"), *few, *evaluated, "--set", "train.steps=4")
    assert second.returncode == 0, second.stderr
    assert re.search(r"^step 4  evaluation loss \d+\.\d{4}", second.stdout, re.MULTILINE)
    assert re.search(r"^step 4  saving in the background: the loop waited [\d.]+ ms$", second.stdout, re.MULTILINE)
    assert re.search(r"^step 4  saved in \d+\.\d\d s$", second.stdout, re.MULTILINE)
    assert "step 4 of 4, resumed at step 3" in second.stdout
    assert (tmp_path / "curve.png").exists()
