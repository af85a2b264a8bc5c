"""Rows of steps: states, branches, tags; a run that changes is noticed, and nothing is read again without need."""

import shutil
import threading
import time
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
from holdfast.web import run_records
from holdfast.web.run_records import RunRecords
from holdfast.web.served_runs import ServedRoots
from tests.web import sample_runs
from tests.web.gated_storage import gated_records


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
    shutil.rmtree(tmp_path / "step-000000000001")
    records.refresh(force=True)
    assert records.gone["step-000000000001"]["why"] == "deleted: last(2) did not keep it"
    shutil.rmtree(tmp_path / "step-000000000002")
    records.refresh(force=True)
    with pytest.raises(NotFound, match=r"step 2 is gone: .*outside of Holdfast: last\(2\) keeps it \(seen at 2"):
        records.entry("step-000000000002")
    with pytest.raises(NotFound, match=r"no step 0: deleted, as far as can be told.*or it was never saved"):
        records.entry("step-000000000000")
    with pytest.raises(NotFound, match="no step in a folder"):
        records.entry("step-000000000009")


def test_a_damaged_step_is_removed_by_no_rule(tmp_path):
    sample_runs.light_steps(tmp_path, [10, 20, 30])
    _save_policy(LocalStorage(tmp_path), parse("last(1) | newer_than(5)"))
    (tmp_path / "step-000000000010" / "holdfast.json").write_bytes(b"{}")
    records = records_of(tmp_path)
    shutil.rmtree(tmp_path / "step-000000000010")
    records.refresh(force=True)
    why = "removed by someone outside of Holdfast: no rule deletes a step whose manifest cannot be read"
    assert records.gone["step-000000000010"]["why"] == why


OUTSIDE = "removed by someone outside of Holdfast"


@pytest.mark.parametrize(
    ("policy", "tag", "step", "why"),
    [
        ("last(2)", None, 10, "deleted: last(2) did not keep it"),
        ("last(2)", None, 30, f"{OUTSIDE}: last(2) keeps it"),
        ("last(1) | every(20)", None, 20, f"{OUTSIDE}: every(20) keeps it"),
        ("last(1) | best(1, 'loss')", None, 10, "deleted: last(1) | best(1, 'loss', 'min') did not keep it"),
        ("last(1) | best(1, 'loss', 'max')", None, 10, f"{OUTSIDE}: best(1, 'loss', 'max') keeps it"),
        ("last(1)", "good", 10, f"{OUTSIDE}: the tag good kept it"),
        (None, None, 10, f"{OUTSIDE}: the run has no rules that delete steps"),
    ],
)
def test_who_removed_a_step_is_told_from_the_rules(tmp_path, policy, tag, step, why):
    storage = LocalStorage(tmp_path)
    sample_runs.light_steps(tmp_path, [10, 20, 30])
    if policy is not None:
        _save_policy(storage, parse(policy))
    if tag is not None:
        add_tag(storage, tag, committed_steps(storage)[0])
    records = records_of(tmp_path)
    shutil.rmtree(tmp_path / f"step-{step:012d}")
    records.refresh(force=True)
    assert records.gone[f"step-{step:012d}"]["why"] == why


@pytest.mark.parametrize(
    ("policy", "step", "why"),
    [
        (None, 10, f"{OUTSIDE}, or before events were kept"),
        ("last(1) | every(20)", 10, "deleted, as far as can be told: last(1) | every(20) did not keep it"),
        ("last(1) | every(20)", 40, f"{OUTSIDE}, or by other rules before: every(20) keeps it"),
    ],
)
def test_a_step_that_nobody_saw_go_is_answered_as_well_as_it_can(tmp_path, policy, step, why):
    sample_runs.light_steps(tmp_path, [50])
    if policy is not None:
        _save_policy(LocalStorage(tmp_path), parse(policy))
    with pytest.raises(NotFound) as error:
        records_of(tmp_path).entry(f"step-{step:012d}")
    assert str(error.value).endswith(f"has no step {step}: {why}, or it was never saved")


def test_a_root_that_is_gone_is_a_problem_and_not_an_error(tmp_path):
    root = tmp_path / "run"
    sample_runs.light_steps(root, [1])
    records = records_of(root)
    root.rename(tmp_path / "elsewhere")
    records.refresh(force=True)
    assert column(records, "step") == [1]
    assert "is gone; the page shows what was there" in records.problem
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


def test_a_slow_storage_holds_up_the_thread_that_looks_and_no_other(tmp_path):
    sample_runs.light_steps(tmp_path / "run", [1])
    records, storage = gated_records(tmp_path, "run")
    records.refresh()
    sample_runs.light_steps(tmp_path / "run", [2])
    storage.close()
    looking = threading.Thread(target=records.refresh, kwargs={"force": True})
    looking.start()
    assert storage.waiting.wait(30)
    records._looked = -1e9  # due again, while the first look has not ended
    began = time.monotonic()
    records.refresh()
    assert records.lock.acquire(timeout=5)
    records.lock.release()
    assert time.monotonic() - began < 5
    assert column(records, "step") == [1]
    storage.gate.set()
    looking.join(30)
    assert column(records, "step") == [1, 2]


def test_a_first_look_that_takes_long_is_said_to(tmp_path, monkeypatch):
    monkeypatch.setattr(run_records, "_FIRST_S", 0.2)
    sample_runs.light_steps(tmp_path / "run", [1])
    records, storage = gated_records(tmp_path, "run")
    storage.close()
    looking = threading.Thread(target=records.refresh)
    looking.start()
    assert storage.waiting.wait(30)
    records.refresh()
    assert (records.rows, records.problem) == ({}, run_records.NO_ANSWER)
    storage.gate.set()
    looking.join(30)
    assert (column(records, "step"), records.problem) == ([1], None)
