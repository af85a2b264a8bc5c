"""The coordinator: it begins an attempt, and publishes or fails by the notes that it finds. No writer takes part."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import LayoutError, PeerFailed, StorageError
from holdfast.core.ranks import host_identity
from holdfast.format.digest import digest_hex
from holdfast.storage.local import LocalStorage
from holdfast.testing.watched import Gate, WatchedSharedStorage
from holdfast.writer import mailbox
from holdfast.writer.coordinator import Coordinator
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import Failure, Outcome, RankReport, SaveOrder, SaveStarted
from tests.writer import two_hosts
from tests.writer.gates import NoListing
from tests.writer.two_hosts import ATTEMPT, BLOCK_BYTES, FOLDER, PLAN

FILE = "model-00001-of-00001.safetensors"
ORDER = SaveOrder(ATTEMPT, FOLDER, Lineage(3), 20.0, 20.0, PLAN)
VALUES = {"note": ["tree", "0" * 32, 0, ["json", 1]]}


class Save:
    """A coordinator that has begun an attempt, and what the ranks would do for it."""

    def __init__(self, root: Path, gate: Gate | None = None, world: int = 2) -> None:
        self.root, self.storage = root, LocalStorage(root)
        storage = self.storage if gate is None else WatchedSharedStorage(self.storage, gate)
        self.coordinator = Coordinator(storage, replace(two_hosts.commit(), world=world), PLAN)
        self.coordinator.begin(ORDER)
        self.mailbox = Mailbox(self.storage, ATTEMPT)

    def write(self) -> None:
        (self.root / ATTEMPT / FILE).write_bytes(two_hosts.file_bytes())

    def report(self, rank: int, plan: str = PLAN) -> None:
        """Report the blocks of the file: rank 0 all but the first, rank 1 the first."""
        data = two_hosts.file_bytes()
        offsets = range(BLOCK_BYTES, len(data), BLOCK_BYTES) if rank == 0 else range(1)
        blocks = [data[offset : offset + BLOCK_BYTES] for offset in offsets]
        reports = (BlockReport(FILE, *pair) for pair in [(o, len(b), digest_hex(b)) for o, b in zip(offsets, blocks)])
        values = VALUES if rank == 0 else {"note": ["tree", "0" * 32, 0, None]}
        self.mailbox.post_report(rank, RankReport(plan, tuple(reports), values))


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return Save(tmp_path)


def test_it_begins_with_a_held_mailbox_and_files_of_full_size(save: Save) -> None:
    assert save.mailbox.host() == host_identity()
    assert save.mailbox.begun() == SaveStarted(3, 2, len(two_hosts.file_bytes()))
    assert save.storage.is_held(save.mailbox.folder)
    assert (save.root / ATTEMPT / FILE).stat().st_size == len(two_hosts.file_bytes())


def test_it_publishes_what_all_ranks_reported(save: Save) -> None:
    save.write()
    (save.root / ATTEMPT / "travel-1-0").write_bytes(b"bytes of a host")
    for rank in (0, 1):
        save.report(rank)
    save.coordinator.finish(ORDER)
    checkpoint = Checkpoint(save.storage, FOLDER)
    assert checkpoint.verify().good and checkpoint.value("note") == 1 and checkpoint.manifest.attempt == ATTEMPT
    assert checkpoint.read("w").tolist() == two_hosts.MATRIX.tolist()
    assert not (save.root / FOLDER / "travel-1-0").exists() and not (save.root / ATTEMPT).exists()


def test_the_failure_of_a_rank_is_the_failure_of_the_save(save: Save) -> None:
    save.report(0)
    save.mailbox.post_report(1, RankReport(PLAN, failure=Failure("StorageError", "the disk is full")))
    with pytest.raises(StorageError, match=r"^rank 1: the disk is full$"):
        save.coordinator.finish(ORDER)


def test_ranks_with_different_plans_publish_nothing(save: Save) -> None:
    save.report(0)
    save.report(1, plan="plan-2")
    with pytest.raises(LayoutError, match="2 different plans"):
        save.coordinator.finish(ORDER)
    assert not (save.root / FOLDER).exists()


def test_bytes_that_nobody_reported_publish_nothing(save: Save) -> None:
    save.report(0)
    save.mailbox.post_report(1, RankReport(PLAN, (), {}))
    with pytest.raises(StorageError, match="no writer reported the bytes from 0"):
        save.coordinator.finish(ORDER)
    assert not (save.root / FOLDER).exists()


def test_a_rank_without_a_report_is_awaited_until_the_deadline(save: Save) -> None:
    save.report(0)
    save.coordinator._started = time.monotonic() - 60
    with pytest.raises(PeerFailed, match="the reports of all writers: not there after 0 s"):
        save.coordinator.finish(replace(ORDER, deadline_s=0.1))


def test_a_rank_that_falls_silent_before_its_report_fails_the_save(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_STATUS_POLL_S", 0.001)
    save.report(0)
    with pytest.raises(PeerFailed, match="the reports of all writers: the writer of rank 1 is silent"):
        save.coordinator.finish(replace(ORDER, silence_s=0.05))


def test_of_a_failed_attempt_only_the_outcome_remains(save: Save) -> None:
    outcome = save.coordinator.conclude(ORDER, StorageError("the disk is full"))
    assert outcome == save.mailbox.outcome() == Outcome(Failure("StorageError", "the disk is full"))
    assert not (save.root / ATTEMPT).exists() and not save.storage.is_held(save.mailbox.folder)


def test_a_published_attempt_has_an_outcome_without_a_failure(save: Save) -> None:
    assert save.coordinator.conclude(ORDER, None) == save.mailbox.outcome() == Outcome()
    assert not save.storage.is_held(save.mailbox.folder)


def test_the_mailbox_stays_until_every_rank_has_read_the_outcome(save: Save) -> None:
    save.coordinator.conclude(ORDER, None)
    save.coordinator.sweep()
    assert save.mailbox.outcome() == Outcome()
    save.mailbox.post_seen(1)
    save.coordinator.sweep()
    assert save.mailbox.names() == set()


def test_a_mailbox_that_is_given_up_goes_unread(save: Save) -> None:
    save.coordinator.conclude(ORDER, None)
    save.coordinator.sweep(give_up=True)
    assert save.mailbox.names() == set()


def test_a_mailbox_that_cannot_be_listed_is_left_to_the_next_start(tmp_path: Path) -> None:
    gate = NoListing()
    save = Save(tmp_path, gate)
    save.coordinator.conclude(ORDER, None)
    gate.down = True
    save.coordinator.sweep()
    gate.down = False
    save.coordinator.sweep(give_up=True)
    assert save.mailbox.outcome() == Outcome()


def test_a_run_of_one_rank_deletes_its_mailbox_without_listing_it(tmp_path: Path) -> None:
    gate = NoListing()
    save = Save(tmp_path, gate, world=1)
    save.coordinator.conclude(ORDER, None)
    gate.down = True
    save.coordinator.sweep()
    assert save.mailbox.names() == set()


@pytest.mark.parametrize("gate", [None, Gate()], ids=["tracked", "not tracked"])
def test_the_data_of_removed_checkpoints_is_deleted(tmp_path: Path, gate: Gate | None) -> None:
    save = Save(tmp_path, gate)
    save.storage.begin(".attempt-of-before")
    save.storage.publish(".attempt-of-before", "step-000000000001")
    assert save.storage.remove("step-000000000001") and list(tmp_path.glob(".removed*"))
    save.coordinator.delete_removed()
    save.coordinator.join()
    assert not list(tmp_path.glob(".removed*"))


def test_the_next_save_deletes_the_last_mailbox(save: Save) -> None:
    save.coordinator.conclude(ORDER, StorageError("the disk is full"))
    save.coordinator.begin(replace(ORDER, attempt=".attempt-fedcba9876543210"))
    assert save.mailbox.names() == set()


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "mine").write_text("x")
    with pytest.raises(StorageError, match="holds files that Holdfast did not write"):
        Save(tmp_path)
    assert not (tmp_path / ATTEMPT).exists()
