"""The enumerator finds what is wrong with naive commits, and nothing wrong with ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.tags import add_tag, read_tags
from holdfast.core.errors import InvalidArgument
from holdfast.format import strictjson
from holdfast.storage import linux
from holdfast.storage.local import LocalStorage
from holdfast.testing.disk import Sync, recorded
from holdfast.testing.judging import RunJudge
from holdfast.testing.powerloss import PowerLossResult, judge_all, legal_states
from holdfast.writer.mailbox import Mailbox, heartbeat
from holdfast.writer.messages import SaveStarted

pytestmark = pytest.mark.slow  # thousands of states of a disk


FILES = {"a": b"a" * 1000, "b": b"b" * 1000, "c": b"c" * 1000, "marker": b"complete"}


def commit(root: Path, *, sync_files: bool, sync_folders: bool) -> None:
    """Three files and a marker in a folder that gets its name last."""
    os.mkdir(root / "new")
    for name, data in FILES.items():
        descriptor = os.open(root / "new" / name, os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(descriptor, data)
        if sync_files:
            os.fsync(descriptor)
        os.close(descriptor)
    if sync_folders:
        sync(root / "new")
    os.rename(root / "new", root / "step")
    if sync_folders:
        sync(root)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def judge(root: Path, marks: Sequence[Any]) -> str:
    """Committed by its name and its marker: then all must be there."""
    step = root / "step"
    if not (step / "marker").exists():
        return "missing" if marks else ""
    return (
        "" if all((step / name).exists() and (step / name).read_bytes() == FILES[name] for name in FILES) else "corrupt"
    )


def outcome_of(root: Path, work: Callable[[], None]) -> PowerLossResult:
    with recorded(root) as recording:
        work()
        recording.mark("acknowledged")
    return judge_all(recording, judge)


@pytest.mark.full
def test_a_commit_by_rename_alone_is_found_corrupt(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, lambda: commit(tmp_path, sync_files=False, sync_folders=False))
    assert outcome.count("corrupt") > 500
    assert outcome.count("missing") > 0


def test_synced_files_without_synced_folders_are_not_enough(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, lambda: commit(tmp_path, sync_files=True, sync_folders=False))
    assert 0 < outcome.count("corrupt") < outcome.states
    assert outcome.count("missing") > 0


@pytest.mark.full
def test_synced_folders_without_synced_files_are_not_enough(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, lambda: commit(tmp_path, sync_files=False, sync_folders=True))
    assert outcome.count("corrupt") > 0


def test_the_full_order_survives(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, lambda: commit(tmp_path, sync_files=True, sync_folders=True))
    assert outcome.states > 20
    assert outcome.bad == []


@pytest.mark.parametrize("left_out", range(7))
def test_each_sync_of_a_local_storage_is_needed(tmp_path: Path, left_out: int) -> None:
    """Take any one fsync of a commit away, and a state appears that is corrupt or missing."""

    def work() -> None:
        storage = LocalStorage(tmp_path / "run")
        storage.begin(".attempt-1")
        for name, data in FILES.items():
            storage.put(".attempt-1", name, data)
        storage.publish(".attempt-1", "step")

    with recorded(tmp_path) as recording:
        work()
        recording.mark("acknowledged")
    assert judge_all(recording, judge, root="run").bad == []
    syncs = [at for at, operation in enumerate(recording.operations) if isinstance(operation, Sync)]
    assert len(syncs) == 7  # of the root's name, of four files, of the folder, of its name
    del recording.operations[syncs[left_out]]
    assert judge_all(recording, judge, root="run").bad


def test_what_was_replaced_stays_until_its_successor_is_certain(tmp_path: Path) -> None:
    """Killed between the exchange and its sync, cleaned up by the next start; then the power goes."""
    storage = LocalStorage(tmp_path)
    for attempt in (".attempt-1", ".attempt-2"):
        storage.begin(attempt)
        for name, data in FILES.items():
            storage.put(attempt, name, data)
        if attempt == ".attempt-1":
            storage.publish(attempt, "step")
    sync(tmp_path / ".attempt-2")
    with recorded(tmp_path) as recording:
        recording.mark("acknowledged")
        linux.exchange(tmp_path / ".attempt-2", tmp_path / "step")
        storage.discard(".attempt-2")
    assert judge_all(recording, judge).bad == []


def test_a_torn_write_is_among_the_states(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY, 0o600)
        os.pwritev(descriptor, [b"abcd", b"efgh"], 2)
        os.close(descriptor)
    found = {dict(tree).get("f") for _, tree, _ in legal_states(recording)}
    assert found == {None, b"", b"\0\0abcdefgh", b"\0\0abcd", b"\0" * 6 + b"efgh", b"\0" * 10}


def test_what_is_synced_is_there_in_every_later_state(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        (tmp_path / "folder").mkdir()
        sync(tmp_path)
        recording.mark("folder")
    trees = [tree for _, tree, marks in legal_states(recording) if marks]
    assert trees == [(("folder", ()),)]


def test_a_rename_happened_or_not_and_never_half(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with recorded(tmp_path) as recording:
        os.rename(tmp_path / "old", tmp_path / "new")
    assert {tree for _, tree, _ in legal_states(recording)} == {(("old", ()),), (("new", ()),)}


def test_a_rename_across_folders_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with recorded(tmp_path) as recording:
        os.mkdir(tmp_path / "one" / "x")
        os.rename(tmp_path / "one" / "x", tmp_path / "two" / "x")
    with pytest.raises(InvalidArgument, match="a rename between two folders"):
        list(legal_states(recording))


def test_what_goes_through_a_python_file_is_recorded(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"abcd")
    found = {dict(tree).get("f") for _, tree, _ in legal_states(recording)}
    assert found == {None, b"", b"abcd", b"ab", b"\0\0cd", bytes(4)}


def test_a_linked_file_has_its_name_or_not(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x")
    with recorded(tmp_path) as recording:
        os.link(tmp_path / "old", tmp_path / "new")
    assert {tuple(dict(tree)) for _, tree, _ in legal_states(recording)} == {("old",), ("new", "old")}


def test_of_very_many_changes_not_every_subset_is_tried(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        for number in range(12):
            (tmp_path / f"{number:02}").mkdir()
    found = {tuple(dict(tree)) for _, tree, _ in legal_states(recording)}
    names = tuple(f"{number:02}" for number in range(12))
    assert {(), names, names[:7], names[3:4], names[:5] + names[6:]} <= found and len(found) < 300


def state() -> dict[str, Any]:
    return {"w": torch.zeros(3)}


def insist(self: Mailbox, name: str) -> Any:
    """Read a note as it was read before: one that cannot be read is an error."""
    return strictjson.loads(self._storage.read(self.folder, name, 1 << 20), name)


@pytest.mark.parametrize("insists", [False, True])
def test_a_run_goes_on_from_every_state_of_its_notes(
    tmp_path: Path, insists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes are never synced. A reader that insists on them is found by the judge; ours is not stuck once."""
    storage = LocalStorage(tmp_path)
    attempt = ".attempt-0123456789abcdef"
    with recorded(tmp_path) as recording, heartbeat(storage, attempt, SaveStarted(1, 1, 9)):
        storage.begin(attempt)
    if insists:
        monkeypatch.setattr(Mailbox, "read", insist)
    outcome = judge_all(recording, RunJudge(state), every=9)
    assert outcome.states > 20
    assert outcome.count("stuck") > 5 if insists else outcome.bad == []


def test_a_tag_that_was_given_survives_with_its_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    holdfast.save(tmp_path / "step-000000000001", state(), step=1)

    def judge(root: Path, told: Sequence[Any]) -> str:
        return "lost" if told and "best" not in read_tags(LocalStorage(root)) else ""

    with recorded(tmp_path) as recording:
        add_tag(storage, "best", committed_steps(storage)[0])
        recording.mark("told")
    assert judge_all(recording, judge).bad == []
