"""Checkpoints that are open: opened once, opened again when they were saved again, few at a time."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from holdfast.core.errors import NotFound
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.web import open_steps
from holdfast.web.open_steps import OpenSteps
from tests.web import sample_runs
from tests.web.test_run_records import records_of

STEP = "step-000000000001"


def test_a_step_that_was_rewritten_in_place_is_opened_again(tmp_path):
    sample_runs.light_steps(tmp_path, [1])
    records, steps = records_of(tmp_path), OpenSteps()
    first = steps.get(records, STEP)
    assert steps.get(records, STEP) is first
    shutil.rmtree(tmp_path / STEP)
    path = sample_runs.write_step(tmp_path, 1, {"model": {"other": np.ones(3, np.float32)}})
    manifest = decode_manifest((path / "holdfast.json").read_bytes(), "")
    (path / "holdfast.json").write_bytes(encode_manifest(replace(manifest, attempt=".attempt-" + "f" * 16)))
    records.refresh(force=True)
    again = steps.get(records, STEP)
    assert again.index("model").keys == ["other"]
    shutil.rmtree(tmp_path / STEP)
    records.refresh(force=True)
    with pytest.raises(NotFound):
        steps.get(records, STEP)


def test_those_looked_at_longest_ago_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(open_steps, "_MOST_OPEN", 2)
    sample_runs.light_steps(tmp_path, [1, 2, 3])
    records, steps = records_of(tmp_path), OpenSteps()
    names = [f"step-{step:012d}" for step in (1, 2, 3)]
    first, second = steps.get(records, names[0]), steps.get(records, names[1])
    assert steps.get(records, names[0]) is first
    steps.get(records, names[2])
    assert steps.get(records, names[0]) is first
    assert steps.get(records, names[1]) is not second
