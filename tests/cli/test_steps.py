"""Steps as people type them: `step-40` for the folder of step 40, and `--step 40` for a step of a root."""

import json
import shutil

import pytest

from holdfast.cli.steps import folder_of_step, with_full_step_name
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.core.names import step_folder
from tests.cli.calls import call
from tests.convert.megatron import write_run


def shown_step(*arguments):
    done = call("show", "--json", *arguments)
    assert done.exit_code == 0, done.exception
    return json.loads(done.output)["step"]


def test_a_short_name_is_the_step_and_option_step_chooses_one(run):
    assert shown_step(run) == 100
    assert shown_step(run / "step-10") == 10
    assert shown_step(f"{run}/step-0002/") == 2
    assert shown_step(run, "--step", 10) == 10
    assert shown_step("--step", 2, f"{run}/") == 2


def test_a_folder_of_the_short_name_is_meant_itself(run):
    shutil.copytree(run / step_folder(2), run / "step-10")
    assert shown_step(run / "step-10") == 2


def test_a_step_that_is_not_there_names_those_that_are(run):
    error = call("show", run, "--step", 11).exception
    assert isinstance(error, NotFound)
    assert str(error) == f"{run} has no step 11; it has 2, 10, 100"
    assert isinstance(call("show", run / "step-11").exception, NotFound)
    (run / "empty").mkdir()
    assert str(call("show", run / "empty", "--step", 1).exception).endswith("has no step 1; it has no steps")
    assert isinstance(call("show", run / "none", "--step", 1).exception, NotFound)


def test_a_checkpoint_or_a_file_has_no_steps(run, step):
    for path in (step, step / "holdfast.json"):
        error = call("verify", path, "--step", 100).exception
        assert isinstance(error, InvalidArgument)
        assert "of a root" in str(error)
    assert call("show", run, "--step", "-1").exit_code == 2


def test_verify_reads_the_chosen_step_only(run):
    assert [len(json.loads(call("verify", "--json", run).output)), 3] == [3, 3]
    assert json.loads(call("verify", "--json", run, "--step", 10).output)["path"].endswith(step_folder(10))


def test_diff_takes_the_same_step_of_two_runs_and_short_names(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    assert call("diff", run, other, "--step", 10).output.endswith("the same\n")
    assert call("diff", run / "step-2", other / "step-100").exit_code == 1


def test_diff_takes_a_step_for_each_path(run):
    def compared(*steps):
        options = [text for step in steps for text in ("--step", step)]
        found = json.loads(call("diff", run, run, *options, "--json").output)
        return [found["first"].rpartition("-")[2].lstrip("0"), found["second"].rpartition("-")[2].lstrip("0")]

    assert compared(2, 10) == ["2", "10"] and compared(10, 2) == ["10", "2"] and compared(10) == ["10", "10"]
    assert compared() == ["100", "100"]
    assert call("diff", run, run, "--step", 1, "--step", 2, "--step", 3).exit_code == 2


def test_iterations_of_megatron_have_the_names_of_steps_too(tmp_path):
    root = write_run(tmp_path / "megatron", 500, 1000)
    assert shown_step(root / "step-500") == 500 and shown_step(root, "--step", 1000) == 1000
    found = json.loads(call("diff", root, root, "--step", 500, "--step", 1000, "--json").output)
    assert [found["first"], found["second"]] == [f"{root}/iter_0000500", f"{root}/iter_0001000"]
    assert with_full_step_name(f"{root}/step-7") == f"{root}/step-7"


def test_convert_and_size_take_a_step(run, tmp_path):
    assert call("convert", run, tmp_path / "a", "--step", 10, "--only", "model").exit_code == 0
    assert call("convert", run / "step-2", tmp_path / "b", "--only", "model").exit_code == 0
    assert [shown_step(tmp_path / name) for name in "ab"] == [10, 2]
    assert step_folder(10) in json.loads(call("size", run, "--step", 10, "--json").output)["source"]


def test_merges_take_short_names_of_steps(run, tmp_path):
    done = call("merge", run / "step-2", run / "step-10", tmp_path / "a", "--donor", run / "step-10", "--dry-run")
    assert "no such" not in done.output + str(done.exception) and step_folder(10) in done.output + str(done.exception)
    error = call("extract-lora", run / "step-2", run / "step-10", tmp_path / "b").exception
    assert step_folder(2) in str(error)


@pytest.mark.parametrize("command", [("arenas",), ("tag", "good"), ("gc",)])
def test_what_takes_a_root_says_so_of_a_step(run, command):
    name, *arguments = command
    error = call(name, run / "step-10", *arguments).exception
    assert str(error) == f"{run}/step-10 is a checkpoint; give the root that contains it"
    assert "it is itself a checkpoint" in call("ls", run / "step-10").output


@pytest.mark.parametrize("path", ["", "runs/llama", "step-x", "step-40x", "runs/step-40/model", "step-" + "1" * 30])
def test_other_paths_stay(path):
    assert with_full_step_name(path) == path


def test_names_are_found_in_the_working_folder_too(run, monkeypatch):
    monkeypatch.chdir(run)
    assert with_full_step_name("step-2") == step_folder(2)
    assert with_full_step_name("./step-2/") == f"./{step_folder(2)}/"
    assert folder_of_step(".", 2) == f"./{step_folder(2)}"
