"""`holdfast train`: checks before it starts, trains, resumes, and starts ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "train", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


def test_help_teaches():
    out = train("--help").stdout
    for word in ("[layout]", "dp_replicate", "--set", "--nproc", "torchrun", "killed run resumes"):
        assert word in out


def test_what_cannot_be_is_refused_before_anything_starts():
    wrong = train(str(EXAMPLES / "dense-tiny.toml"), "--set", "layout.tp=3", "--nproc", "3", "--check")
    assert wrong.returncode == 2
    assert "4 attention heads are not divisible by tp=3" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    for options in ((), ("--nproc", "3")):
        unstarted = train(str(EXAMPLES / "dense-tiny.toml"), "--set", "layout.tp=3", *options)
        assert unstarted.returncode == 2
        assert "4 attention heads are not divisible by tp=3" in unstarted.stderr
    alone = train(str(EXAMPLES / "moe-tiny.toml"))
    assert alone.returncode == 2
    assert "needs 4 ranks, but this is a single process; use --nproc 4" in alone.stderr
    typo = train(str(EXAMPLES / "dense-tiny.toml"), "--set", "train.stepps=3")
    assert typo.returncode == 2
    assert "did you mean steps?" in typo.stderr


@pytest.mark.timeout(500)
def test_trains_on_two_ranks_and_goes_on_with_one(tmp_path: Path):
    few = ["--set", f"train.folder={tmp_path}", "--set", "train.evaluate_every=0"]
    first = train(
        str(EXAMPLES / "dense-tiny.toml"), *few, "--set", "train.steps=3", "--set", "layout.tp=2", "--nproc", "2"
    )
    assert first.returncode == 0, first.stderr
    assert "step 3 of 3" in first.stdout
    second = train(str(EXAMPLES / "dense-tiny.toml"), *few, "--set", "train.steps=4")
    assert second.returncode == 0, second.stderr
    assert "step 4 of 4, resumed at step 3" in second.stdout
    third = train(str(EXAMPLES / "dense-tiny.toml"), *few, "--set", "train.steps=5", "--json")
    step, outcome = (json.loads(line) for line in third.stdout.splitlines())
    assert (step["step"], step["consumed_samples"]) == (5, 80)
    assert outcome == {"outcome": {"step": 5, "resumed_from": 4, "preempted": False}}
    assert (tmp_path / "curve.png").exists()
