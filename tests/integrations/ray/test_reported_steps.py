"""The folders that are reported to Ray: links to a step, or its address."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

import holdfast

fs: Any = None
ReportedSteps: Any
LocalStorage: Any
WorkerRun: Any
address: Any
reported_step: Any
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    try:
        import ray.train.torch  # noqa: F401  (a folder of this name is not enough)

        from holdfast.integrations.ray.reported_steps import ReportedSteps, address, reported_step
        from holdfast.integrations.ray.worker_run import WorkerRun
        from holdfast.storage.local import LocalStorage

        fs = importlib.import_module("pyarrow.fs")
    except ImportError:
        fs = None

pytestmark = [pytest.mark.skipif(fs is None, reason="Ray is not installed: make ray"), pytest.mark.full]


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
