"""Rows of steps: states, branches, tags; a run that changes is noticed, and nothing is read again without need."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.retention import _save_policy
from holdfast.checkpoint.tags import add_tag
from holdfast.core.errors import NotFound
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.keep import parse
from holdfast.storage.local import LocalStorage
from holdfast.web.run_records import RunRecords
from holdfast.web.served_runs import ServedRoots
from tests.web import sample_runs


def records_of(root):
    roots = ServedRoots([str(root)])
    records = RunRecords(roots.list()[0], roots)
    records.refresh()
    return records


def column(records, name):
    return [getattr(row, name) for row in records.rows.values()]


def test_a_rewind_is_a_branch_of_its_own(samples):
    records = records_of(samples / "branches")
    assert column(records, "step") == [10, 15, 20, 30, 35, 40, 45]
    assert column(records, "branch") == [0, 0, 0, 1, 0, 1, 0]
    expected = ["committed", "damaged", "committed", "abandoned", "committed", "abandoned", "committed"]
    assert column(records, "state") == expected
    assert records.rows["step-000000000020"].tags == ("best",)
    assert "earlier step" in records.rows["abandoned-step-000000000030"].note


def test_the_stall_of_a_step_comes_from_its_manifest(tmp_path):
    sample_runs.write_step(tmp_path, 1, {"model": {"w": np.ones(2, np.float32)}}, writer={"world": 1, "stall_ms": 12.5})
    sample_runs.write_step(tmp_path, 2, {"model": {"w": np.ones(2, np.float32)}}, writer={"world": 1, "stall_ms": "x"})
    assert column(records_of(tmp_path), "stall_ms") == [12.5, None]


def test_changes_are_noticed(tmp_path):
    sample_runs.light_steps(tmp_path, range(1, 6))
    records = records_of(tmp_path)
    before = records.rows
    records.refresh(force=True)
    assert records.rows is before
    sample_runs.write_step(tmp_path, 6, {"model": {"w": np.ones(2, np.float32)}})
    records.refresh(force=True)
    assert column(records, "step") == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(tmp_path / "step-000000000002")
    add_tag(LocalStorage(tmp_path), "good", committed_steps(LocalStorage(tmp_path))[-1])
    records.refresh(force=True)
    assert column(records, "step") == [1, 3, 4, 5, 6]
    assert column(records, "tags")[-1] == ("good",)
    (tmp_path / "step-000000000006" / "holdfast.json").write_bytes(b"{}")
    records.refresh(force=True)
    assert column(records, "state")[-1] == "damaged"


def test_a_step_that_was_deleted_says_so(tmp_path):
    """One that the server saw, one from before, and one that never was."""
    sample_runs.light_steps(tmp_path, [1, 2, 3])
    _save_policy(LocalStorage(tmp_path), parse("last(2)"))
    records = records_of(tmp_path)
    shutil.rmtree(tmp_path / "step-000000000002")
    records.refresh(force=True)
    assert records.gone["step-000000000002"]["why"] == "deleted: last(2) did not keep it"
    with pytest.raises(NotFound, match=r"step 2 was deleted: last\(2\) did not keep it \(seen at 2"):
        records.entry("step-000000000002")
    with pytest.raises(NotFound, match=r"no step 0: it was deleted.*or never saved"):
        records.entry("step-000000000000")
    with pytest.raises(NotFound, match="no step in a folder"):
        records.entry("step-000000000009")


def test_a_root_that_is_gone_is_a_problem_and_not_an_error(tmp_path):
    root = tmp_path / "run"
    sample_runs.light_steps(root, [1])
    records = records_of(root)
    root.rename(tmp_path / "elsewhere")
    records.refresh(force=True)
    assert records.rows or records.problem is not None
    (tmp_path / "elsewhere").rename(root)
    records.refresh(force=True)
    assert column(records, "step") == [1]
    assert records.problem is None


def test_metrics_of_steps_are_curves_of_the_living_branch(samples):
    curves = records_of(samples / "light").saved_metrics()
    assert curves["loss"].steps.tolist() == list(range(10, 310, 10))


def test_a_verification_is_remembered_until_the_step_is_saved_again(tmp_path):
    sample_runs.light_steps(tmp_path, [1, 2])
    records = records_of(tmp_path)
    folder = "step-000000000001"
    records.note_verified(folder, records.entry(folder).manifest.attempt, is_good=False)
    assert column(records, "verified") == [False, None]
    assert column(records, "verified_at")[0].startswith("20")
    shutil.rmtree(tmp_path / folder)
    path = sample_runs.write_step(tmp_path, 1, {"model": {"w": np.ones(2, np.float32)}})
    data = (path / "holdfast.json").read_bytes()
    (path / "holdfast.json").write_bytes(encode_manifest(replace(decode_manifest(data, ""), attempt=".attempt-new")))
    records.refresh(force=True)
    assert column(records, "verified") == [None, None]
