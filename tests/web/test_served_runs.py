"""Roots of every kind: a run's root, a training run, a folder of runs, a checkpoint, a hub folder, a bucket."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import holdfast
from holdfast.core.errors import HoldfastError, InvalidArgument, NotFound
from holdfast.web.served_runs import ServedRoots
from tests.objects.conftest import root, server  # noqa: F401
from tests.web import sample_runs
from tests.web.running import running


def kinds(*roots):
    return [(run.name, run.kind) for run in ServedRoots([str(one) for one in roots]).list()]


def test_every_kind_is_recognized(tmp_path):
    sample_runs.light_steps(tmp_path / "runs" / "plain", [1])
    trained = tmp_path / "runs" / "trained"
    sample_runs.light_steps(trained / "checkpoints", [1])
    (trained / "metrics.jsonl").write_text("")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / ".hidden" / "step-000000000001").mkdir(parents=True)
    assert kinds(tmp_path / "runs") == [("plain", "root"), ("trained", "training")]
    assert kinds(trained) == [("trained", "training")]
    assert kinds(trained / "checkpoints") == [("checkpoints", "root")]
    assert kinds(tmp_path / "runs" / "plain" / "step-000000000001") == [("step-000000000001", "checkpoint")]
    assert kinds(tmp_path / "runs" / "other") == [("other", "root")]


def test_a_hub_folder_and_a_file_are_checkpoints(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert kinds(tmp_path) == [(tmp_path.name, "checkpoint")]
    assert kinds(tmp_path / "model.safetensors") == [("model.safetensors", "checkpoint")]


def test_a_run_has_the_same_id_after_a_restart(tmp_path):
    sample_runs.light_steps(tmp_path / "a", [1])
    sample_runs.light_steps(tmp_path / "b", [1])
    ids = [run.id for run in ServedRoots([str(tmp_path)]).list()]
    assert ids == [ServedRoots([str(tmp_path / name)]).list()[0].id for name in "ab"]
    assert len(set(ids)) == 2


def test_a_new_run_is_found_later(tmp_path):
    roots = ServedRoots([str(tmp_path)])
    sample_runs.light_steps(tmp_path / "a", [1])
    sample_runs.light_steps(tmp_path / "b", [1])
    assert [run.name for run in roots.list()] == ["a", "b"]
    with pytest.raises(NotFound):
        roots.get("../b")


def test_a_file_without_tensors_and_an_empty_path_are_no_roots(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(HoldfastError, match=r"notes\.txt: not a tensor file"):
        ServedRoots([str(tmp_path / "notes.txt")])
    with pytest.raises(InvalidArgument, match="empty string"):
        ServedRoots([""])


def test_a_root_that_is_not_there_is_an_error_with_a_way_out(tmp_path):
    with pytest.raises(NotFound, match="give the folder of a run"):
        ServedRoots([str(tmp_path / "nothing")])


def test_an_object_store_is_served(root):  # noqa: F811
    """A real one: a step saved to a bucket is listed, shown, verified and compared, and nothing else is."""
    address, _, options = root.partition("?")
    for number in (1, 2):
        state = {"a.weight": np.full((4, 4), number, np.float32), "b.weight": np.ones(3, np.float32)}
        holdfast.save(f"{address}/step-{number:012d}?{options}", {"model": state}, step=number)
    with running(root) as page:
        run = page.get("/api/runs")["runs"][0]
        assert (run["kind"], run["steps"], run["problem"]) == ("root", 2, None)
        step = f"/api/runs/{run['id']}/steps/step-000000000002"
        assert page.get(f"{step}/tree?filter=weight")["total"] == 2
        assert page.job(f"{step}/verify", {})["result"]["ok"] is True
        rows = page.job(f"{step}/statistics", {"group": "model", "keys": ["a.weight"]})["result"]["tensors"]
        assert (rows[0]["mean"], rows[0]["norm"]) == (2.0, 8.0)
        both = {
            "a": {"run": run["id"], "step": "step-000000000001"},
            "b": {"run": run["id"], "step": "step-000000000002"},
        }
        found = page.job("/api/compare", both)["result"]
        assert (found["same"], found["changed"], found["most_changed"][0]["relative"]) == (1, 1, 1.0)


def test_a_root_that_vanished_hides_no_other(tmp_path):
    for name in "ab":
        sample_runs.light_steps(tmp_path / name, [1])
    roots = ServedRoots([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [run.name for run in roots.list()] == ["a", "b"]
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    assert [run.name for run in roots.list()] == ["a", "b"]
    again = ServedRoots([str(tmp_path / "b"), str(tmp_path / "elsewhere")])
    (tmp_path / "elsewhere").rename(tmp_path / "a")
    assert [(run.name, run.kind) for run in again.list()] == [("b", "root"), ("elsewhere", "root")]


def test_a_root_given_twice_or_within_another_is_there_once(tmp_path):
    sample_runs.light_steps(tmp_path / "x" / "same", [1])
    sample_runs.light_steps(tmp_path / "y" / "same", [1])
    x = tmp_path / "x"
    given = (x, x / "same", f"{x}/same/", x / ".." / "x" / "same", tmp_path / "y")
    runs = ServedRoots([str(one) for one in given]).list()
    assert [(run.name, run.address) for run in runs] == [
        ("same", str(x / "same")), ("same", str(tmp_path / "y" / "same"))
    ]  # fmt: skip
    assert len({run.id for run in runs}) == 2


def test_a_name_that_is_not_utf8_is_served(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xffme"))
    sample_runs.light_steps(folder, [1])
    with running(tmp_path) as page:
        (run,) = page.get("/api/runs")["runs"]
        assert (run["name"], run["steps"]) == ("na\udcffme", 1)
        assert page.get(f"/api/runs/{run['id']}/steps/step-000000000001/tree")["total"] == 1
