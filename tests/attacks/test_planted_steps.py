"""Steps that are links, and steps of other users in a root that they may write to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast import keep
from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import committed_steps, living_steps
from holdfast.cli.main import cli
from holdfast.core.names import step_folder
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.sources import open_source
from holdfast.storage.local import LocalStorage
from tests.users import require_root, shared_folder

STRANGER = 54321


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step)), "note": step}


def restored(root: Path, **options: Any) -> tuple[int | None, list[float]]:
    live: dict[str, Any] = {"w": torch.zeros(3), "note": 0}
    with holdfast.Checkpointer(root) as checkpointer:
        return checkpointer.restore(live, **options), live["w"].tolist()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A root with steps 1, 2 and 3."""
    root = tmp_path / "run"
    for step in (1, 2, 3):
        holdfast.save(root / step_folder(step), state(step), step=step)
    return root


def move_out(run: Path, step: int) -> Path:
    """Make a step a link to a folder outside of the root, as people do when a disk is full."""
    folder = run / step_folder(step)
    target = run.parent / "scratch" / folder.name
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)
    folder.symlink_to(target)
    return target


def call(*arguments: object) -> str:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments]).output


# Links.


def test_the_newest_step_may_be_a_link(run: Path) -> None:
    move_out(run, 3)
    assert restored(run) == (3, [3.0] * 3)
    assert [entry.step for entry in living_steps(LocalStorage(run))] == [1, 2, 3]
    assert len(call("ls", run).splitlines()) == 4 and "DAMAGED" not in call("ls", run)


def test_a_step_by_number_may_be_a_link(run: Path) -> None:
    move_out(run, 2)
    assert restored(run, step=2) == (2, [2.0] * 3)


@pytest.mark.parametrize("target", ["none", "/dev/null"])
def test_a_link_that_leads_nowhere_is_told_and_passed_over(run: Path, target: str) -> None:
    (run / step_folder(9)).symlink_to(target)
    with pytest.warns(UserWarning, match=r"step 9: .* is a symbolic link to .*which (does not exist|is not a folder)"):
        assert restored(run) == (3, [3.0] * 3)
    assert f"DAMAGED: {run / step_folder(9)} is a symbolic link" in call("ls", run)
    assert json.loads(call("ls", run, "--json"))[-1]["good"] is False


def test_a_link_to_another_step_is_damage(run: Path) -> None:
    (run / step_folder(9)).symlink_to(step_folder(2))
    with pytest.warns(UserWarning, match="its manifest belongs to step 2"):
        assert restored(run)[0] == 3


def test_retention_deletes_the_link_and_nothing_behind_it(run: Path) -> None:
    target = move_out(run, 1)
    before = tree(target)
    outcome = retention.apply(LocalStorage(run), keep.last(1), committed=3)
    assert outcome.removed == [1, 2] and not outcome.problems
    LocalStorage(run).sweep()
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".policy")) == [step_folder(3)]
    assert tree(target) == before and holdfast.open(target).verify().good


def test_gc_deletes_the_link_and_nothing_behind_it(run: Path) -> None:
    target = move_out(run, 2)
    before = tree(target)
    assert "2 deleted" in call("gc", run, "--keep", "last(1)")
    assert not os.path.lexists(run / step_folder(2)) and tree(target) == before


def test_a_linked_step_that_somebody_reads_stays(run: Path) -> None:
    move_out(run, 1)
    with holdfast.open(run / step_folder(1)).held():
        assert retention.apply(LocalStorage(run), keep.last(1), committed=3).busy == [1]
    assert (run / step_folder(1)).is_symlink()


def test_saving_a_linked_step_again_replaces_the_link(run: Path) -> None:
    target = move_out(run, 3)
    before = tree(target)
    with holdfast.Checkpointer(run) as checkpointer:
        assert checkpointer.restore({"w": torch.zeros(3), "note": 0}) == 3
        checkpointer.save(3, state(33)).result(60)
    assert not (run / step_folder(3)).is_symlink() and tree(target) == before
    assert restored(run) == (3, [33.0] * 3)
    assert [path.name for path in run.iterdir() if path.name.startswith((".removed", ".attempt", ".mail"))] == []


def test_a_rewind_sets_a_link_aside(run: Path) -> None:
    target = move_out(run, 3)
    before = tree(target)
    with holdfast.Checkpointer(run) as checkpointer:
        checkpointer.restore({"w": torch.zeros(3), "note": 0}, step=2)
        checkpointer.save(4, state(4)).result(60)
    assert (run / f"abandoned-{step_folder(3)}").is_symlink() and tree(target) == before
    assert restored(run)[0] == 4


@pytest.mark.parametrize("name", [".removed-step-000000000001-00000000", ".attempt-0123456789abcdef"])
def test_a_link_that_a_crash_left_is_cleaned_and_nothing_behind_it(run: Path, name: str) -> None:
    target = move_out(run, 1)
    before = tree(target)
    (run / step_folder(1)).rename(run / name)
    assert restored(run) == (3, [3.0] * 3)
    assert not os.path.lexists(run / name) and tree(target) == before


def test_a_checkpoint_is_not_saved_to_a_path_that_is_a_link(run: Path) -> None:
    target = move_out(run, 3)
    before = tree(target)
    with pytest.raises(holdfast.StorageError, match="is a symbolic link; give the path of its target"):
        holdfast.save(run / step_folder(3), state(5), step=3)
    assert tree(target) == before and (run / step_folder(3)).is_symlink()


def test_a_link_that_is_no_step_takes_its_name(run: Path) -> None:
    storage = LocalStorage(run)
    (run / "taken").symlink_to("none")
    assert retention.unused_name(storage, "taken") == "taken-2"
    with pytest.raises(holdfast.StorageError, match="a folder of that name already exists"):
        storage.rename(step_folder(1), "taken")


# Other users.


@pytest.fixture
def shared(run: Path) -> Iterator[Path]:
    """A root of this user in which every user may make folders, and a step 9 that a stranger put there."""
    require_root()
    with shared_folder() as top:
        root = top / "run"
        shutil.copytree(run, root)
        root.chmod(0o1777)
        plant(root, 9)
        yield root


def plant(root: Path, step: int, **fields: Any) -> Path:
    """A step of another user, with every digest right."""
    folder = root / step_folder(step)
    holdfast.save(folder, state(step), step=step)
    manifest = decode_manifest((folder / "holdfast.json").read_bytes(), "planted")
    if fields:
        (folder / "holdfast.json").write_bytes(encode_manifest(replace(manifest, **fields)))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    return folder


def test_a_strangers_newest_step_is_refused_with_the_way_to_allow_it(shared: Path) -> None:
    with pytest.raises(holdfast.Untrusted) as caught:
        restored(shared)
    for word in (str(shared / step_folder(9)), f"uid {STRANGER}", f"HOLDFAST_TRUST_OWNERS={STRANGER}", "move"):
        assert word in str(caught.value)
    with pytest.raises(holdfast.Untrusted):
        restored(shared, step=9)
    assert restored(shared, step=3) == (3, [3.0] * 3)


def test_it_is_taken_once_its_owner_is_trusted(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TRUST_OWNERS", str(STRANGER))
    assert restored(shared) == (9, [9.0] * 3)


def test_without_it_the_own_newest_step_is_restored(shared: Path) -> None:
    (shared / step_folder(9)).rename(shared / "strange")
    assert restored(shared) == (3, [3.0] * 3)


def test_a_strangers_older_step_is_in_nobodys_way(shared: Path) -> None:
    (shared / step_folder(9)).rename(shared / "strange")
    plant(shared, 0)
    assert restored(shared) == (3, [3.0] * 3)


def test_a_step_that_is_named_by_its_path_is_read(shared: Path) -> None:
    live: dict[str, Any] = {"w": torch.zeros(3), "note": 0}
    holdfast.load(shared / step_folder(9), live)
    assert live["w"].tolist() == [9.0] * 3
    assert holdfast.open(shared / step_folder(9)).verify().good


def test_commands_say_whose_it_is_and_take_the_own_newest(shared: Path, tmp_path: Path) -> None:
    assert "NOT TRUSTED" in call("ls", shared) and f"uid {STRANGER}" in call("ls", shared)
    assert json.loads(call("ls", shared, "--json"))[-1]["good"] is False
    assert "step 9 is skipped" in call("show", shared) and "HOLDFAST_TRUST_OWNERS" in call("show", shared)
    assert "NOT TRUSTED" in call("verify", shared) and call("verify", shared).count(": good") == 4
    with pytest.warns(UserWarning, match="step 9 is skipped"):
        assert open_source(shared).step == 3
    assert "NOT TRUSTED" in call("top", shared, "--once")


def test_a_strangers_step_does_not_count_in_retention(shared: Path) -> None:
    """Else one with a high number would be the newest, and what is kept with last(1) only that."""
    storage = LocalStorage(shared)
    decisions = {decision.entry.step: decision.stays for decision in retention.decide(storage, keep.last(1), 3)}
    assert decisions == {1: False, 2: False, 3: True, 9: True}
    assert retention.apply(storage, keep.last(1), committed=3).removed == [1, 2]
    assert (shared / step_folder(9)).is_dir()


def test_a_strangers_manifest_gives_up_nobodys_steps(shared: Path) -> None:
    own = {entry.step: entry.manifest.attempt for entry in committed_steps(LocalStorage(shared)) if entry.manifest}
    shutil.rmtree(shared / step_folder(9))
    plant(shared, 8, abandons=tuple(own.items()), skips=tuple(own.items()))
    assert [entry.step for entry in living_steps(LocalStorage(shared)) if entry.manifest] == [1, 2, 3]
    retention.apply(LocalStorage(shared), None)
    assert not list(shared.glob("abandoned-*"))


def test_a_strangers_policy_deletes_nothing(shared: Path) -> None:
    shutil.rmtree(shared / step_folder(9))
    (shared / ".policy").mkdir()
    (shared / ".policy" / "keep.json").write_text(json.dumps(keep.last(1).fields()))
    for path in (shared / ".policy", shared / ".policy" / "keep.json"):
        os.chown(path, STRANGER, STRANGER)
    done = CliRunner().invoke(cli, ["gc", str(shared)])
    assert isinstance(done.exception, holdfast.Untrusted) and "--keep" in str(done.exception)
    assert len(list(shared.glob("step-*"))) == 3
    assert "2 deleted" in call("gc", shared, "--keep", "last(1)")


def test_a_save_goes_on_in_a_root_with_a_strangers_step(shared: Path) -> None:
    with holdfast.Checkpointer(shared, keep=keep.last(2)) as checkpointer:
        checkpointer.restore({"w": torch.zeros(3), "note": 0}, step=3)
        assert checkpointer.save(10, state(10)).result(60).verify().good
    assert (shared / step_folder(9)).is_dir()
    assert restored(shared) == (10, [10.0] * 3)
