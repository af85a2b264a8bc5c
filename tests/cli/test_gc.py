import json
import os

import holdfast
from holdfast import keep
from holdfast.checkpoint import retention
from holdfast.storage.local import LocalStorage
from tests.cli.calls import call, process


def steps(run):
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))


def test_a_dry_run_says_what_would_go_and_why_the_rest_stays(run):
    done = call("gc", run, "--keep", "every(10)", "--dry-run")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == "policy: every(10)"
    assert any("step-000000000002" in line and "would be deleted" in line for line in lines)
    assert any("step-000000000010" in line and "kept" in line and "every(10)" in line for line in lines)
    assert lines[-1].startswith("1 would be deleted, ")
    assert steps(run) == [2, 10, 100]


def test_what_no_policy_keeps_goes_and_the_newest_never(run):
    assert call("gc", run, "--keep", "every(7)").output.splitlines()[-1].startswith("2 deleted")
    assert steps(run) == [100]
    assert [path.name for path in run.iterdir() if path.name.startswith(".removed")] == []


def test_it_goes_by_the_policy_of_the_run(run):
    assert "policy: none" in call("gc", run).output
    assert steps(run) == [2, 10, 100]
    retention.apply(LocalStorage(run), keep.last(2), committed=100)
    assert json.loads(call("gc", run, "--json").output)["policy"] == "last(2)"
    assert steps(run) == [10, 100]


def test_tagged_steps_stay(run):
    assert call("tag", run, "first", "--step", 2).exit_code == 0
    assert "tag first" in call("gc", run, "--keep", "last(1)").output
    assert steps(run) == [2, 100]
    assert call("tag", run, "first", "--delete").output == f"no tags under {run}\n"
    call("gc", run, "--keep", "last(1)")
    assert steps(run) == [100]


def test_tags_are_listed_moved_and_refused(run):
    said = call("tag", run, "best").output.split()
    assert said == ["tag", "step", "folder", "best", "100", "step-000000000100"]
    assert call("tag", run, "best", "--step", 10).output.startswith("best was on step 100\n")
    assert call("tag", run, "best", "--step", 10, "--delete").exit_code == 2
    assert json.loads(call("tag", run, "--json").output)["best"]["step"] == 10
    assert isinstance(call("tag", run, "best", "--step", 11).exception, holdfast.NotFound)
    assert isinstance(call("tag", run, "other", "--delete").exception, holdfast.NotFound)
    assert isinstance(call("tag", run, "../x").exception, holdfast.InvalidArgument)
    assert call("tag", run, "--delete").exit_code == 2


def test_a_step_that_is_read_stays(run):
    reader = holdfast.open(run / "step-000000000002")
    with reader.held():
        done = process("gc", run, "--keep", "last(1)")
    assert "it is being read" in done.stdout and done.returncode == 0
    assert steps(run) == [2, 100]


def test_dead_saves_are_cleared_and_living_ones_left_alone(run):
    for name in (".attempt-00000000000000aa", ".attempt-00000000000000bb"):
        os.mkdir(run / name)
    hold = LocalStorage(run).hold(".attempt-00000000000000bb")
    done = process("gc", run)
    hold.release()
    assert "left by a dead save" in done.stdout
    assert not (run / ".attempt-00000000000000aa").exists()
    assert (run / ".attempt-00000000000000bb").exists()


def test_what_was_set_aside_goes_only_when_asked_for(run):
    for kind in ("abandoned", "damaged"):
        (run / "step-000000000002").rename(run / f"{kind}-step-000000000002")
        (run / f"{kind}-step-000000000002").rename(run / f"{kind}-step-000000000002-2")
        assert f"--{kind} deletes it" in call("gc", run).output
        assert (run / f"{kind}-step-000000000002-2").exists()
        assert call("gc", run, f"--{kind}", "--dry-run").output.splitlines()[-1].startswith("1 would be deleted")
        call("gc", run, f"--{kind}")
        assert not (run / f"{kind}-step-000000000002-2").exists()
        (run / "step-000000000010").rename(run / "step-000000000002") if kind == "abandoned" else None


def test_a_root_that_is_not_there_is_told(tmp_path):
    for name in ("gc", "tag"):
        done = process(name, tmp_path / "none")
        assert done.returncode == 2 and "no such folder" in done.stderr


def test_a_checkpoint_is_no_root(step):
    for name in ("gc", "tag"):
        assert "give the root that contains it" in str(call(name, step).exception)


def test_a_policy_that_is_none_is_refused(run):
    for text in ("", "last(2) & every(3)", "newer_than(1.2.3)"):
        assert isinstance(call("gc", run, "--keep", text).exception, holdfast.InvalidArgument)
    assert steps(run) == [2, 10, 100]
