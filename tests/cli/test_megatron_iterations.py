"""`holdfast ls` of a Megatron run."""

import json

import pytest

from tests.cli.calls import call
from tests.convert.megatron import write_iteration, write_run


@pytest.fixture
def root(tmp_path):
    return write_run(tmp_path / "run", 1000, 500)


def test_iterations_are_listed_with_the_newest(root):
    done = call("ls", root)
    assert done.exit_code == 0
    head, first, second, how = done.output.splitlines()
    assert head.split() == ["step", "size", "folder", "notes"]
    assert first.split()[0] == "500" and first.endswith(
        "iter_0000500  the newest, by latest_checkpointed_iteration.txt"
    )
    assert second.split()[0] == "1000" and second.endswith("iter_0001000")
    assert how == "a Megatron run; holdfast show and convert take its root, with --step N for one of these"


def test_json_has_the_bytes_of_each(root):
    found = json.loads(call("ls", root, "--json").output)
    assert [entry["step"] for entry in found] == [500, 1000]
    size = sum(file.stat().st_size for file in (root / "iter_0001000").iterdir())
    assert found[1] == {"step": 1000, "folder": "iter_0001000", "bytes": size, "notes": []}


def test_a_run_without_a_tracker_or_with_a_bad_one_is_listed(root):
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("five")
    done = call("ls", root)
    assert done.exit_code == 0 and "iter_0000500" in done.output and "neither an iteration nor" in done.output
    tracker.unlink()
    assert "iter_0001000" in call("ls", root).output and "the newest" not in call("ls", root).output


def test_a_release_and_a_folder_that_is_missing_are_named(root):
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("2000")
    assert "iter_0002000  the newest, by latest_checkpointed_iteration.txt, and missing" in call("ls", root).output
    write_iteration(root / "iter_0000001", None).rename(root / "release")
    tracker.write_text("release")
    entry = json.loads(call("ls", root, "--json").output)[-1]
    assert entry["step"] is None and entry["folder"] == "release" and entry["bytes"] > 0


def test_other_folders_and_runs_of_holdfast_are_no_run_of_megatron(tmp_path, run):
    assert call("ls", tmp_path / "none").exit_code
    (tmp_path / "empty").mkdir()
    assert "no checkpoints under" in call("ls", tmp_path / "empty").output
    (run / "iter_0000005").mkdir()
    assert "iter_0000005" not in call("ls", run).output
