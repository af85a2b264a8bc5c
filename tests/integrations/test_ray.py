"""Ray Train with RayCheckpointer: in local mode, and in a cluster on this machine. `make ray` installs Ray."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.integrations.launcher import Launcher

ray_run: Any
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    try:
        import ray.train.torch  # noqa: F401  (a folder of this name is not enough)
        from pyarrow import fs

        from holdfast.integrations.ray import RayCheckpointer, address
        from holdfast.integrations.ray.reported_steps import ReportedSteps, reported_step
        from holdfast.integrations.ray.worker_run import WorkerRun
        from holdfast.storage.local import LocalStorage
        from tests.integrations import ray_run
    except ImportError:
        ray_run = None

pytestmark = [
    pytest.mark.skipif(ray_run is None, reason="Ray is not installed: make ray"),
    pytest.mark.full,
    pytest.mark.timeout(900),
]
QUIET = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["tests.integrations.ray_run"]) as made:
        yield made


def read_log(folder: Path, rank: int) -> tuple[list[dict], dict[int, dict], list[dict]]:
    """Return the starts of the lives, the numbers of each step, and the saves; a step done twice is done alike."""
    lines = [json.loads(line) for line in (folder / f"log-{rank}.jsonl").read_text().splitlines()]
    steps: dict[int, dict] = {}
    for line in [line for line in lines if "step" in line]:
        assert steps.setdefault(line["step"], line) == line
    return [line for line in lines if "started" in line], steps, [line for line in lines if "saved" in line]


# Local mode: no cluster, the ranks of a launcher.


def local(folder: Path, **config: Any) -> dict[str, Any]:
    return {"out": str(folder / "out"), "root": str(folder / "root"), **config}


def test_in_local_mode_a_killed_run_goes_on_exactly_and_reports_committed_steps(launcher: Launcher, tmp_path: Path):
    whole = launcher.values(2, ray_run.fit_locally, local(tmp_path / "whole"), environment=QUIET)
    stop = tmp_path / "now"
    config = local(tmp_path / "run", stop_at=8, kill_file=str(stop))
    dead = launcher.run(2, ray_run.fit_locally, config, environment=QUIET, kill_file=stop)
    assert all(outcome.killed for outcome in dead), dead
    resumed = launcher.values(2, ray_run.fit_locally, local(tmp_path / "run"), environment=QUIET)
    for rank in range(2):
        _, steps, saves = read_log(tmp_path / "whole" / "out", rank)
        lives, again, _ = read_log(tmp_path / "run" / "out", rank)
        assert [life["started"] for life in lives] == [0, 6]
        assert again == steps and len(steps) == ray_run.STEPS
        assert [save["known"] for save in saves] == ([None, 3, 6, 9] if rank == 0 else [None] * 4)
    assert whole[0]["checkpoint"] == str(tmp_path / "whole" / "root" / f"step-{ray_run.STEPS:012d}")
    assert holdfast.open(resumed[0]["checkpoint"]).step == ray_run.STEPS
    assert resumed[0]["metrics"] == whole[0]["metrics"] and resumed[0]["metrics"]["run"] == "a"
    assert resumed[0]["returned"]["digest"] == whole[0]["returned"]["digest"]


def test_a_checkpoint_begins_another_run_on_another_number_of_workers(launcher: Launcher, tmp_path: Path):
    (one,) = launcher.values(1, ray_run.fit_locally, local(tmp_path / "one"), environment=QUIET)
    config = local(tmp_path / "two", begin_from=one["checkpoint"], steps=15)
    first, second = launcher.values(2, ray_run.fit_locally, config, environment=QUIET)
    for found in (first, second):
        assert found["returned"]["start"] == ray_run.STEPS
        assert found["returned"]["begun"] == one["returned"]["digest"] != found["returned"]["digest"]
    assert holdfast.open(first["checkpoint"]).step == 15
    (more,) = launcher.values(1, ray_run.fit_locally, local(tmp_path / "two", begin_from=one["checkpoint"], steps=18))
    assert more["returned"]["start"] == 15, "a run that has steps goes on from its own"


def without_restore(config: dict[str, Any]) -> None:
    with RayCheckpointer(config["root"]) as ck:
        ck.save_and_report({"loss": 1.0}, 3, ray_run.make_state())


def from_the_first_step(config: dict[str, Any]) -> None:
    state = ray_run.make_state()
    with RayCheckpointer(config["root"]) as ck:
        assert ck.restore(state) == ray_run.STEPS
        ck.save_and_report({"loss": 1.0}, 3, state)


def with_a_new_optimizer(config: dict[str, Any]) -> None:
    state = ray_run.make_state()
    with RayCheckpointer(config["root"]) as ck:
        ck.restore(state)
        state["optimizer"] = ray_run.torch.optim.AdamW(state["model"].parameters())
        ck.save_and_report({"loss": 1.0}, 15, state)


def without_the_optimizer(config: dict[str, Any]) -> None:
    state = ray_run.make_state()
    with RayCheckpointer(config["root"]) as ck:
        ck.restore({"model": state["model"]}, only=["model/*"])
        ck.save_and_report({"loss": 1.0}, 15, state)


def saved_twice(config: dict[str, Any]) -> None:
    state = ray_run.make_state()
    with RayCheckpointer(config["root"]) as ck:
        ck.restore(state)
        ck.save_and_report({"loss": 1.0}, 15, state)
        ck.save_and_report({"loss": 1.0}, 15, state)


def with_an_occasion(config: dict[str, Any]) -> None:
    RayCheckpointer(config["root"], when=holdfast.when.steps(3))


def without_a_root(config: dict[str, Any]) -> None:
    RayCheckpointer()


def with_text_as_metrics(config: dict[str, Any]) -> None:
    with RayCheckpointer(config["root"]) as ck:
        wrong: Any = "loss 1.0"
        ck.save_and_report(wrong, 15, ray_run.make_state())


def test_the_first_save_asserts_that_what_was_asked_for_was_loaded(launcher: Launcher, tmp_path: Path):
    config = local(tmp_path)
    launcher.values(1, ray_run.fit_locally, config, environment=QUIET)
    wrong = {
        without_restore: "restore(state) was not called",
        from_the_first_step: "step 3 is saved after step 12: the loop did not go on",
        with_a_new_optimizer: "'optimizer' is not the AdamW that was restored",
        without_the_optimizer: "'optimizer' is saved and was not in the state that was restored",
        saved_twice: "step 15 is saved after step 15",
        with_an_occasion: "when=: save_and_report saves whenever it is called",
        without_a_root: "Ray's local mode has no storage path",
        with_text_as_metrics: "metrics='loss 1.0' must map names to values",
    }
    for loop, message in wrong.items():
        (outcome,) = launcher.run(1, ray_run.call_locally, loop, config, environment=QUIET)
        assert message in str(outcome.error), (loop.__name__, outcome.error)


def test_it_belongs_into_a_train_loop(tmp_path: Path):
    with pytest.raises(holdfast.InvalidArgument, match="the train loop of a TorchTrainer"):
        RayCheckpointer(tmp_path)


# The folders that are reported.


@pytest.fixture
def saved(tmp_path: Path) -> list[Any]:
    (tmp_path / "run").mkdir()
    state = {"note": {"a": 1}}
    root = tmp_path / "run" / "holdfast"
    return [holdfast.save(root / f"step-{step:012d}", state) for step in (3, 6)]


def reported(tmp_path: Path, keeps: int | None = None, files: Any = None) -> Any:
    run = WorkerRun(0, str(tmp_path / "run"), files or fs.LocalFileSystem(), keeps)
    return ReportedSteps(run, LocalStorage(tmp_path / "run" / "holdfast"))


def remove(step: Any) -> None:
    for path in Path(step.path).iterdir():
        path.unlink()
    Path(step.path).rmdir()


def test_a_report_links_the_files_of_the_step_and_deleting_it_deletes_no_step(tmp_path: Path, saved: list[Any]):
    steps = reported(tmp_path)
    checkpoint = steps.report_of(saved[0])
    assert address(checkpoint) == str(tmp_path / "run" / "checkpoint-step-000000000003")
    assert reported_step(checkpoint) == 3
    opened = holdfast.open(address(checkpoint))
    assert opened.step == 3 and opened.verify().good
    assert {path.stat().st_nlink for path in Path(checkpoint.path).iterdir()} == {2}
    checkpoint.filesystem.delete_dir(checkpoint.path)  # as Ray's CheckpointConfig does
    assert saved[0].verify().good


def test_a_life_after_a_crash_reports_the_folder_that_is_there(tmp_path: Path, saved: list[Any]):
    first = reported(tmp_path).report_of(saved[0])
    assert reported(tmp_path).report_of(saved[0]).path == first.path
    (tmp_path / "run" / "checkpoint-step-000000000006.making").mkdir()  # a crash amid the links
    assert holdfast.open(reported(tmp_path).report_of(saved[1]).path).step == 6
    assert not list((tmp_path / "run").glob("*.making"))


def test_a_step_that_is_saved_anew_is_reported_under_another_name(tmp_path: Path, saved: list[Any]):
    steps = reported(tmp_path)
    first = steps.report_of(saved[0])
    anew = holdfast.save(saved[0].path, {"note": {"a": 2}})
    second = steps.report_of(anew)
    assert second.path == f"{first.path}.1" and reported_step(second) == 3
    assert steps.free_removed(second) == ""
    assert holdfast.open(second.path).state["note"] == anew.state["note"]
    assert [path.name for path in Path(first.path).iterdir()] == ["removed.txt"]


@pytest.mark.parametrize("keeps", [None, 1])
def test_a_removed_step_frees_its_space_unless_ray_chooses_what_to_keep(
    tmp_path: Path, saved: list[Any], keeps: int | None
):
    steps = reported(tmp_path, keeps)
    first, second = map(steps.report_of, saved)
    for step in saved:
        remove(step)
    assert reported(tmp_path, keeps).free_removed(second) == ""
    assert holdfast.open(second.path).verify().good, "the newest one is what Ray resumes from"
    left = [path.name for path in Path(first.path).iterdir()]
    assert (left == ["removed.txt"]) == (keeps is None)
    if keeps is not None:
        assert holdfast.open(first.path).verify().good
        return
    with pytest.raises(holdfast.NotFound, match="not a checkpoint"):
        holdfast.open(first.path)


def test_without_links_a_report_holds_the_address_of_the_step(tmp_path: Path, saved: list[Any]):
    """As on an object store: another file system of pyarrow, with the same folders."""
    other = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    steps = reported(tmp_path, files=other)
    checkpoint = steps.report_of(saved[0])
    assert checkpoint.path.endswith("checkpoint-step-000000000003") and reported_step(checkpoint) == 3
    assert address(checkpoint) == saved[0].path
    assert holdfast.open(address(checkpoint)).step == 3
    assert steps.report_of(saved[0]).path == f"{checkpoint.path}.1", "Ray knows the first"
    assert steps.free_removed(checkpoint) == ""


def test_a_file_system_without_links_gets_addresses(tmp_path: Path, saved: list[Any], monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # as exFAT does

    monkeypatch.setattr("os.link", refuse)
    checkpoint = reported(tmp_path).report_of(saved[0])
    assert [path.name for path in Path(checkpoint.path).iterdir()] == ["address.json"]
    assert address(checkpoint) == saved[0].path


def test_roots(tmp_path: Path):
    run = WorkerRun(0, "/runs/a", fs.LocalFileSystem(), None)
    assert run.root(None) == "/runs/a/holdfast"
    assert run.root("/elsewhere") == "/elsewhere" and run.root("s3://bucket/a") == "s3://bucket/a"
    with pytest.raises(holdfast.InvalidArgument, match="root='runs/b' is relative"):
        run.root("runs/b")
    bucket = fs.S3FileSystem(anonymous=True, region="us-east-1")
    assert WorkerRun(0, "bucket/runs/a", bucket, None).root(None) == "s3://bucket/runs/a/holdfast"
    other = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    with pytest.raises(holdfast.InvalidArgument, match="on a subtree file system"):
        WorkerRun(0, "/runs/a", other, None).root(None)
