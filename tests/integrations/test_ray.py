"""Ray Train with RayCheckpointer: in local mode, and in a cluster on this machine. `make ray` installs Ray."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from tests.integrations.launcher import Launcher

ray_run: Any
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    try:
        import ray.train.torch  # noqa: F401  (a folder of this name is not enough)

        from holdfast.integrations.ray import RayCheckpointer, address
        from holdfast.integrations.ray.reported_steps import reported_step
        from tests.integrations import ray_run
    except ImportError:
        ray_run = None

pytestmark = [
    pytest.mark.skipif(ray_run is None, reason="Ray is not installed: make ray"),
    pytest.mark.full,
    pytest.mark.timeout(1200),
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


def spied(loop: Callable[[Any], Any]) -> list[tuple[dict[str, Any], int | None]]:
    """Return the metrics and the step of every report that a function makes."""
    made = []
    real = ray_run.ray.train.report

    def report(metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
        made.append((metrics, None if checkpoint is None else holdfast.open(address(checkpoint)).step))
        real(metrics, checkpoint=checkpoint, **options)

    ray_run.ray.train.report = report
    try:
        loop(made)
    finally:
        ray_run.ray.train.report = real
    return made


def with_a_save_that_fails(config: dict[str, Any]) -> Any:
    def loop(_: Any) -> None:
        state: dict[str, Any] = {"weights": {"a": ray_run.torch.ones(8)}}
        with RayCheckpointer(config["root"]) as ck:
            ck.restore(state)
            ck.save_and_report({"loss": 3.0, "name": "x", "rate": np.float32(0.5)}, 3, state)
            state["weights"]["b"] = object()
            assert "b: a value of type builtins.object" in str(ck.save_and_report({"loss": 6.0}, 6, state).error)
            del state["weights"]["b"]
            ck.save_and_report({"loss": ray_run.torch.tensor(9.0)}, 9, state)

    return spied(loop)


def with_saves_that_are_skipped(config: dict[str, Any]) -> Any:
    saved = []

    def loop(_: Any) -> None:
        state = {"weights": {"a": ray_run.torch.ones(4_000_000)}}
        with RayCheckpointer(config["root"], on_busy="skip") as ck:
            ck.restore(state)
            for step in range(1, 9):
                if not ck.save_and_report({"step": step}, step, state).skipped:
                    saved.append(step)

    return spied(loop), saved


def with_an_error(config: dict[str, Any]) -> Any:
    def loop(made: list[Any]) -> None:
        state = {"note": {"a": 1}}
        with pytest.raises(ZeroDivisionError), RayCheckpointer(config["root"]) as ck:
            ck.restore(state)
            ck.save_and_report({"loss": 1.0}, 3, state)
            raise ZeroDivisionError
        assert made == [], "a report is a barrier that the other workers may never reach"
        with RayCheckpointer(config["root"]) as ck:
            assert ck.restore(state) == 3, "the save in flight was finished"

    return spied(loop)


def where_ray_knows_more(config: dict[str, Any]) -> Any:
    state = {"note": {"a": 1}}
    with holdfast.Checkpointer(f"{config['root']}/old") as plain:
        plain.save(3, state)
    with RayCheckpointer(f"{config['root']}/new") as ck:
        ck.restore(state)
        ck.save_and_report({"loss": 1.0}, 6, state)
    with warnings.catch_warnings(record=True) as caught, RayCheckpointer(f"{config['root']}/old") as ck:
        warnings.simplefilter("always")
        assert ck.restore(state) == 3
    with RayCheckpointer(f"{config['root']}/empty") as ck, pytest.raises(holdfast.NotFound) as error:
        ck.restore(state)
    return [str(one.message) for one in caught], str(error.value)


def test_every_save_is_one_report_with_the_committed_step_if_there_is_one(launcher: Launcher, tmp_path: Path):
    (made,) = launcher.values(1, ray_run.call_locally, with_a_save_that_fails, local(tmp_path / "fails"))
    assert made == [({"loss": 3.0, "name": "x", "rate": 0.5}, 3), ({"loss": 6.0}, None), ({"loss": 9.0}, 9)]
    stored = holdfast.open(tmp_path / "fails" / "root" / f"step-{3:012d}").manifest.metrics
    assert stored == {"loss": 3.0, "rate": 0.5}
    ((made, saved),) = launcher.values(1, ray_run.call_locally, with_saves_that_are_skipped, local(tmp_path / "skips"))
    assert made == [({"step": step}, step) for step in saved]
    assert 0 < len(saved) < 8
    (made,) = launcher.values(1, ray_run.call_locally, with_an_error, local(tmp_path / "error"))
    assert made == [({"loss": 1.0}, 3)], "the life after it reports what was not"


def test_what_ray_knows_and_the_root_lacks(launcher: Launcher, tmp_path: Path):
    ((warned, error),) = launcher.values(1, ray_run.call_locally, where_ray_knows_more, local(tmp_path))
    assert ["step 6 was reported to Ray and cannot be restored: goes on from step 3"] == warned
    assert error.startswith("step 6 was reported to Ray, and ") and "has no step" in error


def with_a_mapping(config: dict[str, Any]) -> Any:
    state = {"model": ray_run.make_state()["model"]}
    with RayCheckpointer(config["root"], mapping=config["mapping"]) as ck:
        found = ck.restore(state, begin_from=config.get("begin_from"))
        begun = ray_run.digest(state["model"])
        with ray_run.torch.no_grad():
            state["model"][0].weight.add_(1)
        ck.save_and_report({"loss": 1.0}, (found or 0) + 1, state)
    return found, begun, ray_run.digest(state["model"]), ray_run.ray.train.get_checkpoint().path


@pytest.mark.parametrize("by_module", [False, True])
def test_a_run_begins_from_another_through_the_mapping_of_both(launcher: Launcher, tmp_path: Path, by_module: bool):
    statements = ["0.weight -> first.weight", "0.bias -> first.bias"]
    mapping: Any = {"model": statements} if by_module else statements
    config = local(tmp_path / "a", mapping=mapping)
    ((none, _, ended, path),) = launcher.values(1, ray_run.call_locally, with_a_mapping, config)
    assert none is None and "first.weight" in holdfast.open(path).keys()
    config = local(tmp_path / "b", mapping=mapping, begin_from=path)
    ((found, begun, _, _),) = launcher.values(1, ray_run.call_locally, with_a_mapping, config)
    assert (found, begun) == (1, ended)


# A cluster on this machine.


@dataclass(frozen=True)
class Runs:
    """The results of the runs in the cluster by name, the folder of all, and the run that never stopped."""

    folder: Path
    found: dict[str, dict[str, Any]]
    whole: dict[str, Any]

    def steps(self, name: str) -> list[int]:
        return holdfast.Checkpointer(self.folder / name / "holdfast").steps()

    def reports(self, fit: str, name: str) -> list[tuple[int | None, bool]]:
        """Return the step of each checkpoint that Ray knew after a fit, and whether it opens now."""
        folders = [self.folder / name / reported for reported, _ in self.found[fit]["reported"]]
        assert all(folder.is_dir() for folder in folders), "Ray would not start this run again"
        steps = [reported_step(ray_run.ray.train.Checkpoint(str(folder))) for folder in folders]
        return [(step, (folder / "holdfast.json").exists()) for step, folder in zip(steps, folders, strict=True)]


@pytest.fixture(scope="module")
def runs(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("cluster")
    whole = launcher.values(2, ray_run.fit_locally, local(folder / "whole"), environment=QUIET)
    (found,) = launcher.values(1, ray_run.fit_all, str(folder), environment=QUIET, deadline_s=1000)
    return Runs(folder, found, whole[0])


def test_workers_that_are_killed_in_a_cluster_go_on_exactly(runs: Runs):
    for rank in range(2):
        _, steps, _ = read_log(runs.folder / "whole" / "out", rank)
        lives, again, _ = read_log(runs.folder / "killed-log", rank)
        assert len(lives) == 4, "two workers were killed, and then the run went on under its name"
        assert all(life["started"] >= least for life, least in zip(lives, (0, 3, 6, 12), strict=True))
        assert {step: numbers for step, numbers in again.items() if step <= ray_run.STEPS} == steps
        assert len(steps) == ray_run.STEPS
    killed = runs.found["killed"]
    assert killed["metrics"] == runs.whole["metrics"] and killed["metrics"]["run"] == "a"
    assert killed["returned"]["digest"] == runs.whole["returned"]["digest"]


def test_a_run_goes_on_under_its_name_after_keep_removed_what_ray_knows(runs: Runs):
    again = runs.found["again"]["returned"]
    assert again["start"] == ray_run.STEPS and again["begun"] == runs.whole["returned"]["digest"]
    assert runs.steps("killed") == [12, 15]


def test_ray_knows_each_step_once_and_keep_frees_the_space(runs: Runs):
    """Ray drops reports that it has not fetched from a worker that dies; it hears of the restored step again."""
    reports = runs.reports("again", "killed")
    steps = [step or 0 for step, _ in reports]
    assert steps == sorted(set(steps)) and reports[-2:] == [(12, True), (15, True)]
    folders = sorted((runs.folder / "killed").glob("checkpoint-step-*"))
    assert len(folders) == 5
    assert all([path.name for path in folder.iterdir()] == ["removed.txt"] for folder in folders[:3])


def test_the_checkpoint_of_the_result_opens_and_begins_a_run_on_another_number_of_workers(runs: Runs):
    path = runs.found["killed"]["path"]
    opened = holdfast.open(path)
    assert opened.step == ray_run.STEPS and opened.verify().good
    torch = ray_run.torch
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    holdfast.load(path, {"model": model})
    assert ray_run.digest(model) == runs.whole["returned"]["digest"]
    one = runs.found["one"]["returned"]
    assert one["world"] == 1 and one["start"] == ray_run.STEPS
    assert one["begun"] == runs.whole["returned"]["digest"] != one["digest"]


def test_ray_rotates_its_folders_and_no_step_of_holdfast(runs: Runs):
    assert runs.reports("one", "one") == [(18, True)]
    assert len(list((runs.folder / "one").glob("checkpoint-step-*"))) == 1
    assert runs.steps("one") == [15, 18]
    for step in runs.steps("one"):
        assert holdfast.open(runs.folder / "one" / "holdfast" / f"step-{step:012d}").verify().good
