"""Which steps stay: policies, tags, readers, branches, and what a crash leaves half done."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import holdfast
from holdfast import keep
from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import committed_steps, living_steps, set_aside_folders
from holdfast.checkpoint.tags import add_tag, read_tags, remove_tag, tagged
from holdfast.cli.main import cli
from holdfast.core.names import abandoned_folder, step_folder
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.storage.identity import IDENTITY
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage

pytestmark = pytest.mark.slow  # most tests run a Checkpointer with its writer process


NOW = datetime.now(UTC)


def manifest(step: int, age_s: float = 0.0, **metrics: float | None) -> Manifest:
    created = (NOW - timedelta(seconds=age_s)).isoformat(timespec="seconds")
    return Manifest(step, None, f".attempt-{step}", created, 1 << 20, {}, {}, {}, metrics)


def state_of(value: float) -> dict[str, object]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model}


def value_of(state: dict[str, object]) -> float:
    model = state["model"]
    assert isinstance(model, nn.Linear)
    return float(model.weight.detach()[0, 0])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name not in (".policy", ".tags", IDENTITY))


STEPS = [manifest(step, age_s=1000 - step, loss=abs(step - 40.0)) for step in range(10, 101, 10)]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (keep.last(3), [80, 90, 100]),
        (keep.last(99), [*range(10, 101, 10)]),
        (keep.every(50), [50, 100]),
        (keep.every(7), [70]),
        (keep.best(2, "loss"), [40, 50]),
        (keep.best(2, "loss", "max"), [90, 100]),
        (keep.best(2, "accuracy"), [*range(10, 101, 10)]),  # it may be misspelt
        (keep.newer_than(925), [80, 90, 100]),
        (keep.newer_than(timedelta(days=1)), [*range(10, 101, 10)]),
        (keep.last(1) | keep.every(30) | keep.best(1, "loss"), [30, 40, 60, 90, 100]),
    ],
)
def test_each_policy_keeps_what_it_says(policy: keep.Policy, kept: list[int]) -> None:
    assert sorted(policy.kept(STEPS, NOW)) == kept
    assert sorted(keep.parse(str(policy)).kept(STEPS, NOW)) == kept
    assert keep.Policy.from_fields(policy.fields()) == policy


def test_ties_of_a_metric_go_to_the_newer_and_what_is_no_number_is_no_best() -> None:
    measured = [manifest(1, loss=2.0), manifest(2, loss=2.0), manifest(3, loss=None), manifest(4)]
    assert list(keep.best(1, "loss").kept(measured)) == [2]
    assert keep.check_metrics({"loss": float("nan"), "x": torch.tensor(2.5)}) == {"loss": None, "x": 2.5}


@pytest.mark.parametrize("text", ["90m", "1.5h", "36 h", "2d", "1w", "30s"])
def test_durations_are_written_as_people_do(text: str) -> None:
    assert keep.parse(f"newer_than({text})") == keep.newer_than(text)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: keep.last(0),
        lambda: keep.last(True),
        lambda: keep.every(-1),
        lambda: keep.best(1, ""),
        lambda: keep.best(1, "loss", "low"),
        lambda: keep.newer_than("soon"),
        lambda: keep.newer_than(0),
        lambda: keep.parse("last(3) | first(2)"),
        lambda: keep.parse("last"),
        lambda: keep.parse("last(1, 2)"),
        lambda: keep.check_metrics([1]),
        lambda: keep.check_metrics({"loss": "low"}),
        lambda: keep.check_metrics({"loss": [1, 2]}),
        lambda: holdfast.Checkpointer(MemoryStorage(), keep=3),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(holdfast.InvalidArgument):
        wrong()


def run(root: Any, policy: keep.Policy, steps: range, **save) -> list[int]:
    with holdfast.Checkpointer(root, keep=policy) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), metrics={"loss": abs(step - 4.5)}).result()
        return checkpointer.steps()


@pytest.mark.parametrize("kind", ["background", "memory"])
def test_a_run_keeps_what_its_policy_says(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "run" if kind == "background" else MemoryStorage()
    assert run(root, keep.last(2) | keep.best(1, "loss"), range(1, 9)) == [5, 7, 8]
    if kind == "background":
        assert names(tmp_path / "run") == [step_folder(step) for step in (5, 7, 8)]
        assert retention.saved_policy(LocalStorage(tmp_path / "run")) == keep.last(2) | keep.best(1, "loss")


def test_what_was_just_committed_stays_though_higher_steps_are_there(tmp_path: Path) -> None:
    run(tmp_path, keep.last(2), range(100, 103))
    assert run(tmp_path, keep.last(2), range(1, 3)) == [2, 101, 102]


def test_a_tagged_step_stays_until_its_tag_goes(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run(tmp_path, keep.last(9), range(1, 4))
    add_tag(storage, "released", living_steps(storage)[0])
    assert run(tmp_path, keep.last(1), range(4, 6)) == [1, 5]
    remove_tag(storage, "released")
    assert read_tags(storage) == {}
    assert retention.apply(storage, keep.last(1)).removed == [1]


def test_a_tag_that_cannot_be_read_keeps_everything(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run(tmp_path, keep.last(9), range(1, 4))
    add_tag(storage, "released", living_steps(storage)[0])
    (tmp_path / ".tags" / "released").write_text("{")
    outcome = retention.apply(storage, keep.last(1))
    assert outcome.removed == [] and "released" in outcome.problems[0]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", ".hidden", "x" * 300])
def test_hostile_tags_are_refused(name: str, tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 2))
    storage = LocalStorage(tmp_path)
    with pytest.raises(holdfast.InvalidArgument):
        add_tag(storage, name, living_steps(storage)[0])


def test_a_step_that_is_read_stays_until_its_reader_is_done(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 4))
    storage = LocalStorage(tmp_path)
    reader = holdfast.open(tmp_path / step_folder(1))
    with reader.held():
        outcome = retention.apply(storage, keep.last(1))
        assert (outcome.busy, outcome.removed) == ([1], [2])
        assert reader.verify().good
    assert retention.apply(storage, keep.last(1)).removed == [1]
    storage.sweep()
    with pytest.raises(holdfast.NotFound, match="being removed"), reader.held():
        pytest.fail("it is gone")


def test_a_reader_sees_the_whole_step_it_opened_though_it_is_removed_or_replaced(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 4))
    first, second = (holdfast.open(tmp_path / step_folder(step)) for step in (1, 2))
    storage = LocalStorage(tmp_path)
    with holdfast.Checkpointer(tmp_path) as checkpointer, first.held():
        checkpointer.save(1, state_of(77.0)).result()
        assert float(first.read("weight")[0, 0]) == 1.0
    storage.remove(second.folder)
    with second.held():
        storage.sweep()
        assert float(second.read("weight")[0, 0]) == 2.0
    storage.sweep()
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_a_damaged_step_is_never_removed_by_itself(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 4))
    flip(tmp_path / step_folder(1) / "holdfast.json")
    outcome = retention.apply(LocalStorage(tmp_path), keep.last(1))
    LocalStorage(tmp_path).sweep()
    assert outcome.removed == [2]
    assert names(tmp_path) == [step_folder(1), step_folder(3)]


def test_the_newest_good_step_stays_though_a_damaged_one_is_newer(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 5))
    flip(tmp_path / step_folder(4) / "model-00001-of-00001.safetensors")
    assert retention.apply(LocalStorage(tmp_path), keep.last(1)).removed == [1, 2]


def test_without_a_policy_nothing_goes(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state_of(step))
        checkpointer.finish()
        assert checkpointer.steps() == [0, 1, 2, 3, 4]


# Branches.


def rewound(root: Path) -> holdfast.Checkpointer:
    """A run that saved steps 1 to 4 and went back to 2."""
    run(root, keep.last(9), range(1, 5))
    checkpointer = holdfast.Checkpointer(root, keep=keep.last(2))
    state = state_of(0.0)
    assert checkpointer.restore(state, step=2) == 2 and value_of(state) == 2.0
    return checkpointer


def test_the_first_commit_after_a_rewind_sets_later_steps_aside(tmp_path: Path) -> None:
    with rewound(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 4]
        checkpointer.save(20, state_of(20.0)).result()
        assert checkpointer.steps() == [2, 20]
    assert names(tmp_path) == [abandoned_folder(3), abandoned_folder(4), step_folder(2), step_folder(20)]
    assert holdfast.open(tmp_path / abandoned_folder(4)).verify().good
    assert holdfast.open(tmp_path / step_folder(20)).manifest.parent == 2


def test_a_rewind_without_a_commit_changes_nothing(tmp_path: Path) -> None:
    rewound(tmp_path).close()
    assert holdfast.Checkpointer(tmp_path).restore(state_of(0.0)) == 4


def test_a_step_that_is_saved_again_after_a_rewind_is_set_aside_too(tmp_path: Path) -> None:
    with rewound(tmp_path) as checkpointer:
        checkpointer.save(4, state_of(44.0)).result()
    assert names(tmp_path) == [abandoned_folder(3), abandoned_folder(4), step_folder(2), step_folder(4)]
    state = state_of(0.0)
    holdfast.load(tmp_path / abandoned_folder(4), state)
    assert value_of(state) == 4.0
    assert holdfast.Checkpointer(tmp_path).restore(state) == 4 and value_of(state) == 44.0


def test_a_rewind_that_saves_the_same_step_at_once_gives_up_the_later_ones(tmp_path: Path) -> None:
    with rewound(tmp_path) as checkpointer:
        checkpointer.save(2, state_of(2.0)).result()
    assert holdfast.Checkpointer(tmp_path).restore(state_of(0.0)) == 2


def test_two_rewinds_keep_both_branches(tmp_path: Path) -> None:
    for value in (20.0, 30.0):
        with holdfast.Checkpointer(tmp_path) as checkpointer:
            if value == 20.0:
                for step in (1, 2, 3):
                    checkpointer.save(step, state_of(step)).result()
            checkpointer.restore(state_of(0.0), step=1)
            checkpointer.save(3, state_of(value)).result()
    aside = [name for name in names(tmp_path) if name.startswith("abandoned")]
    assert aside == [abandoned_folder(2), abandoned_folder(3), f"{abandoned_folder(3)}-2"]


def test_what_a_rewind_gave_up_does_not_come_back_where_it_could_not_be_renamed(tmp_path: Path) -> None:
    with rewound(tmp_path) as checkpointer:
        checkpointer.save(20, state_of(20.0)).result()
    (tmp_path / abandoned_folder(4)).rename(tmp_path / step_folder(4))
    newest = tmp_path / step_folder(20) / "holdfast.json"
    shutil.copytree(tmp_path / step_folder(4), tmp_path / step_folder(90))
    left = decode_manifest((tmp_path / step_folder(4) / "holdfast.json").read_bytes(), "it")
    moved = tmp_path / step_folder(90) / "holdfast.json"
    moved.write_bytes(encode_manifest(replace(left, step=90)))
    manifest = decode_manifest(newest.read_bytes(), "it")
    newest.write_bytes(encode_manifest(replace(manifest, abandons=(*manifest.abandons, (90, left.attempt)))))
    assert [entry.step for entry in living_steps(LocalStorage(tmp_path))] == [2, 20]
    state = state_of(0.0)
    checkpointer = holdfast.Checkpointer(tmp_path)
    assert checkpointer.restore(state) == 20 and value_of(state) == 20.0
    checkpointer.close()
    assert {abandoned_folder(4), abandoned_folder(90)} <= set(names(tmp_path))


def test_a_crash_between_the_exchange_and_the_new_name_loses_no_branch(tmp_path: Path) -> None:
    with rewound(tmp_path) as checkpointer:
        checkpointer.save(4, state_of(44.0)).result()
    (tmp_path / abandoned_folder(4)).rename(tmp_path / ".attempt-0123456789abcdef")
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of(0.0)) == 4
    assert abandoned_folder(4) in names(tmp_path)


# Fallback.


def damaged_run(root: Path, *steps: int) -> None:
    run(root, keep.last(9), range(1, 5))
    for step in steps:
        flip(root / step_folder(step) / "model-00001-of-00001.safetensors")


def test_a_damaged_step_is_passed_over_for_good_and_stays_where_it_is(tmp_path: Path) -> None:
    damaged_run(tmp_path, 4)
    with holdfast.Checkpointer(tmp_path, keep=keep.last(1)) as checkpointer:
        with pytest.warns(holdfast.HoldfastWarning, match="step 4: .*digest"):
            assert checkpointer.restore(state_of(0.0)) == 3
        checkpointer.save(2, state_of(22.0)).result()
        assert checkpointer.steps() == [2, 3]
    assert names(tmp_path) == [step_folder(step) for step in (2, 3, 4)]
    state = state_of(0.0)
    assert holdfast.Checkpointer(tmp_path).restore(state) == 3  # the highest of the living branch


def test_damaged_steps_are_moved_when_that_is_asked_for(tmp_path: Path) -> None:
    damaged_run(tmp_path, 4)
    flip(tmp_path / step_folder(3) / "holdfast.json")
    with holdfast.Checkpointer(tmp_path) as checkpointer, pytest.warns(holdfast.HoldfastWarning, match="skipped"):
        assert checkpointer.restore(state_of(0.0), move_damaged=True) == 2
    aside = [f"damaged-{step_folder(step)}" for step in (3, 4)]
    assert names(tmp_path) == sorted([*aside, step_folder(1), step_folder(2)])
    assert not holdfast.open(tmp_path / aside[1]).verify().good


def test_when_nothing_is_good_the_error_says_what_was_overwritten(tmp_path: Path) -> None:
    damaged_run(tmp_path, 1, 2, 3, 4)
    state = state_of(0.0)
    with pytest.raises(
        holdfast.Damaged, match=r"no checkpoint is good; .* overwritten with parts of them: model\n(.*\n)*.*step 1"
    ):
        holdfast.Checkpointer(tmp_path).restore(state)
    for step in range(1, 5):
        flip(tmp_path / step_folder(step) / "holdfast.json")
    with pytest.raises(holdfast.Damaged, match="the live state was not touched"):
        holdfast.Checkpointer(tmp_path).restore(state)


# What a reviewer found.


def test_gc_does_not_take_what_was_saved_under_the_name_since_it_looked(tmp_path: Path, monkeypatch) -> None:
    run(tmp_path, keep.last(9), range(1, 4))
    decide = retention.decide

    def decide_and_wait(*arguments: Any) -> list[retention.Decision]:
        decisions = decide(*arguments)
        with holdfast.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(state_of(0.0), step=1)
            checkpointer.save(2, state_of(22.0)).result()
        return decisions

    monkeypatch.setattr(retention, "decide", decide_and_wait)
    assert retention.apply(LocalStorage(tmp_path), keep.last(1)).removed == [1]
    state = state_of(0.0)
    assert holdfast.Checkpointer(tmp_path).restore(state) == 2 and value_of(state) == 22.0


def test_a_run_without_a_policy_is_remembered_as_one(tmp_path: Path) -> None:
    run(tmp_path, keep.last(1), range(1, 3))
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state_of(3.0)).result()
    assert retention.saved_policy(LocalStorage(tmp_path)) is None


def test_a_tag_goes_with_what_was_tagged_when_a_rewind_sets_it_aside(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run(tmp_path, keep.last(9), range(1, 4))
    add_tag(storage, "best", living_steps(storage)[-1])
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(state_of(0.0), step=1)
        for step in (3, 4):
            checkpointer.save(step, state_of(10.0 * step)).result()
    everything = [*committed_steps(storage), *set_aside_folders(storage)]
    assert tagged(storage, everything) == {abandoned_folder(3): ["best"]}
    assert retention.apply(storage, keep.last(1)).removed == [1, 3]


def test_the_same_content_as_a_step_that_was_left_is_committed_anew(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 4))
    tensors = tmp_path / step_folder(3) / "model-00001-of-00001.safetensors"
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        flip(tensors)
        with pytest.warns(holdfast.HoldfastWarning, match="step 3"):
            assert checkpointer.restore(state_of(0.0)) == 2
        state = state_of(2.5)
        checkpointer.save(2, state).result()
        flip(tensors)  # the damage was not there to stay
        model = nn.Linear(2, 2)
        model.load_state_dict(
            {key: torch.from_numpy(holdfast.open(tmp_path / step_folder(3)).read(key)) for key in ("weight", "bias")}
        )
        checkpointer.save(3, {"model": model}).result()
        assert checkpointer.steps() == [1, 2, 3]


def test_steps_of_a_first_rewind_do_not_come_back_after_a_second(tmp_path: Path, monkeypatch) -> None:
    run(tmp_path, keep.last(9), range(3, 7))
    rename = LocalStorage.rename

    def refuse(self: LocalStorage, folder: str, name: str, attempt: str = "") -> None:
        if folder == step_folder(6):
            raise holdfast.StorageError("not now")
        rename(self, folder, name, attempt)

    monkeypatch.setattr(LocalStorage, "rename", refuse)
    storage = MemoryLike(tmp_path)
    for step in (4, 5):
        with holdfast.Checkpointer(storage) as checkpointer:
            checkpointer.restore(state_of(0.0), step=3)
            checkpointer.save(step, state_of(10.0 * step)).result()
    assert holdfast.Checkpointer(storage).steps() == [3, 5]


class MemoryLike(LocalStorage):
    """Local files that no other process can open, so that saves happen here."""

    def __getattribute__(self, name: str) -> object:
        if name in ("address", "exists", "hold", "is_held", "poll_s"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_going_back_before_a_step_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 4))
    newest = tmp_path / step_folder(3) / "holdfast.json"
    fields = strictjson.loads(newest.read_bytes(), "it")
    fields["version"], _ = [9, 0], fields.pop("digest")
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    newest.write_bytes(strictjson.dumps(fields) + b"\n")
    checkpointer = holdfast.Checkpointer(tmp_path)
    with pytest.raises(holdfast.StorageError, match="step 3 cannot be read now"):
        checkpointer.restore(state_of(0.0), step=1)
    with pytest.raises(holdfast.Unsupported, match="move step-000000000003 away"):
        checkpointer.restore(state_of(0.0))
    newest.parent.rename(tmp_path / step_folder(1).replace("1", "0"))  # an older one of that kind matters to nobody
    assert checkpointer.restore(state_of(0.0)) == 2


def test_a_loss_that_is_not_a_number_survives_in_memory(tmp_path: Path) -> None:
    assert keep.check_metrics(keep.check_metrics({"loss": float("nan")})) == {"loss": None}


def test_gc_shows_steps_that_were_passed_over_and_removes_them_when_asked(tmp_path: Path) -> None:
    damaged_run(tmp_path, 4)
    with holdfast.Checkpointer(tmp_path) as checkpointer, pytest.warns(holdfast.HoldfastWarning, match="skipped"):
        checkpointer.restore(state_of(0.0))
        checkpointer.save(5, state_of(5.0)).result()
    said = CliRunner().invoke(cli, ["gc", str(tmp_path)]).output
    assert "step-000000000004" in said and "--damaged deletes it" in said
    CliRunner().invoke(cli, ["gc", str(tmp_path), "--damaged"])
    assert names(tmp_path) == [step_folder(step) for step in (1, 2, 3, 5)]


def test_a_commit_stands_though_what_was_removed_cannot_be_deleted(tmp_path: Path, monkeypatch) -> None:
    def fail(self: LocalStorage) -> None:
        raise holdfast.StorageError("busy")

    monkeypatch.setattr(LocalStorage, "sweep", fail)
    with holdfast.Checkpointer(MemoryLike(tmp_path), keep=keep.last(1)) as checkpointer:
        assert checkpointer.save(1, state_of(1.0)).result().step == 1
        assert checkpointer.save(2, state_of(2.0)).result().manifest.parent == 1


def test_a_checkpoint_that_was_removed_after_it_was_opened_is_gone_not_damaged(tmp_path: Path) -> None:
    run(tmp_path, keep.last(9), range(1, 3))
    opened = holdfast.open(tmp_path / step_folder(1))
    run(tmp_path, keep.last(1), range(3, 5))
    with pytest.raises(holdfast.NotFound, match="removed or replaced since it was opened"):
        opened.read("weight")


def test_gc_removes_nothing_when_no_step_is_good(tmp_path: Path) -> None:
    damaged_run(tmp_path, 1, 2, 3, 4)
    assert retention.apply(LocalStorage(tmp_path), keep.last(1)).removed == []
