"""The attempt writer: one rank's blocks, travel files, report and card, without coordinator or processes."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.checkpoint import gather
from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.shared_memory import Arena, is_held, seal
from holdfast.core.errors import Damaged, PeerFailed, StorageError
from holdfast.format.digest import digest_hex
from holdfast.plan.writer_job import WriterJob
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.testing.watched import Buffers, Gate, watched
from holdfast.writer import arena_card, write_attempt
from holdfast.writer.arena_card import Card, card_path
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import AssignJob, Failure, Outcome, RankReport, SaveOrder, SaveStarted
from holdfast.writer.write_attempt import AttemptWriter, Workspace
from tests.writer import two_hosts
from tests.writer.gates import Count
from tests.writer.two_hosts import ATTEMPT, FOLDER, PLAN

FILE = "model-00001-of-00001.safetensors"
ORDER = SaveOrder(ATTEMPT, FOLDER, Lineage(3), 5.0, 5.0, PLAN)
ONE_HOST, TWO_HOSTS = (0, 0), (0, 1)
VALUES = {"note": ["tree", "0" * 32, 0, ["json", 1]]}


class StillHeart:
    """A heartbeat that posts nothing."""

    def __init__(self) -> None:
        self.written, self.phase, self.stopped = 0, "", False


class Rank:
    """A rank's writer with its arena, under a root where the attempt has begun."""

    def __init__(
        self,
        root: Path,
        rank: int,
        hosts: tuple[int, int],
        *,
        storage: Storage | None = None,
        job: WriterJob | None = None,
        **assigned: Any,
    ) -> None:
        self.rank, self.root = rank, root
        self.arenas = {other: str(root / f"arena-{other}") for other in (0, 1) if hosts[other] == hosts[rank]}
        for other, path in self.arenas.items():
            if not Path(path).exists():
                two_hosts.fill_arena(Path(path), other, hosts)
        assignment = AssignJob(str(root), job or two_hosts.job(rank, hosts), None, self.arenas, 2, "root", **assigned)
        self.workspace = Workspace(assignment, lambda address: storage or LocalStorage(Path(address)))
        self.mailbox = Mailbox(self.workspace.storage, ATTEMPT)
        self.heart = cast(Any, StillHeart())
        self.writer = AttemptWriter(self.workspace, ORDER, self.mailbox, self.heart)

    @property
    def card(self) -> Path:
        return Path(card_path(self.arenas[self.rank]))

    def blocks(self) -> tuple[BlockReport, ...]:
        """The reports that the rank's job should lead to."""
        whole = two_hosts.file_bytes()
        return tuple(
            BlockReport(block.file, block.offset, block.size, digest_hex(whole[block.offset :][: block.size]))
            for block in self.workspace.job.blocks
        )

    def change_byte(self) -> None:
        memory = Arena(self.arenas[self.rank], 4600).bytes
        memory[4096] ^= 1


class WholeFiles(LocalStorage):
    """A storage that takes a file only in order, and shows it only once it is synced, as an object store does."""

    whole_files = True

    def create(self, attempt: str, name: str, size: int) -> None:
        """Create nothing: the file begins to exist when its writer is synced."""

    def writer(self, attempt: str, name: str) -> Any:
        return WholeFile(self.root / attempt / name)


class WholeFile:
    def __init__(self, path: Path) -> None:
        self._path, self._data = path, b""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        assert offset == len(self._data), "a file is written from its beginning to its end"
        time.sleep(0.01)  # another thread, if there is one, comes with the next block meanwhile
        self._data += b"".join(buffers)

    def sync(self) -> None:
        self._path.write_bytes(self._data)

    def close(self) -> None:
        """Do nothing: what was not synced is lost."""


class PortionSizes(Gate):
    """Records how many bytes each write has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def write(self, kind: str, where: str, buffers: Buffers, work: Callable[[Buffers], None]) -> None:
        if kind == "write":
            self.sizes.append(sum(buffer.nbytes for buffer in buffers))
        work(buffers)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path)
    mailbox = Mailbox(storage, ATTEMPT)
    mailbox.make()
    Attempt(storage, ATTEMPT, FOLDER).create([(FILE, len(two_hosts.file_bytes()))])
    mailbox.post_begun(SaveStarted(3, 2, len(two_hosts.file_bytes())))
    return tmp_path


def test_the_ranks_of_one_host_write_the_file_and_report_their_blocks(root: Path) -> None:
    ranks = [Rank(root, rank, ONE_HOST) for rank in (0, 1)]
    for rank in ranks:
        rank.writer.run(VALUES)
        assert rank.mailbox.report_of(rank.rank) == RankReport(PLAN, rank.blocks(), VALUES)
        assert rank.heart.written == sum(block.size for block in rank.blocks())
    assert (root / ATTEMPT / FILE).read_bytes() == two_hosts.file_bytes()


def test_a_card_describes_what_was_written(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    rank.writer.run(VALUES)
    card = Card.read(rank.card)
    assert (card.attempt, card.rank, card.reports, card.values) == (ATTEMPT, 0, rank.blocks(), VALUES)
    assert (card.root, card.arena_digest, card.commit) == ("root", "", None)


def test_bytes_for_another_host_travel_through_the_attempt(root: Path) -> None:
    first, second = (Rank(root, rank, TWO_HOSTS) for rank in (0, 1))
    second.writer.run({})
    assert (root / ATTEMPT / "travel-1-0").stat().st_size == second.workspace.job.travel[0].size
    assert "gave-1" in second.mailbox.names()
    first.writer.run({})
    assert (root / ATTEMPT / FILE).read_bytes() == two_hosts.file_bytes()
    assert first.mailbox.report_of(0) == RankReport(PLAN, first.blocks(), {})


def test_a_travel_file_is_the_same_in_small_portions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rank(root, 1, TWO_HOSTS).writer.run({})
    whole = (root / ATTEMPT / "travel-1-0").read_bytes()
    (root / ATTEMPT / "travel-1-0").unlink()
    monkeypatch.setattr(gather, "_TRAVEL_BYTES", 1)
    Rank(root, 1, TWO_HOSTS).writer.run({})
    assert (root / ATTEMPT / "travel-1-0").read_bytes() == whole


def test_a_portion_of_a_travel_file_stays_within_its_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_TRAVEL_BYTES", 96)
    gate = PortionSizes()
    rank = Rank(root, 1, TWO_HOSTS, storage=watched(LocalStorage(root), gate))
    rank.writer.run({})
    assert gate.sizes == [8, 96, 96] and sum(gate.sizes) == rank.workspace.job.travel[0].size


def test_a_storage_of_whole_files_gets_the_blocks_of_a_file_in_order(root: Path) -> None:
    jobs = [two_hosts.job(rank, ONE_HOST) for rank in (0, 1)]
    job = replace(jobs[0], blocks=tuple(block for job in jobs for block in job.blocks))
    rank = Rank(root, 0, ONE_HOST, storage=WholeFiles(root), job=job)
    rank.writer.run({})
    assert (root / ATTEMPT / FILE).read_bytes() == two_hosts.file_bytes()


def test_a_travel_file_is_complete_in_a_storage_of_whole_files(root: Path) -> None:
    Rank(root, 1, TWO_HOSTS, storage=WholeFiles(root)).writer.run({})
    Rank(root, 0, TWO_HOSTS, storage=WholeFiles(root)).writer.run({})
    assert (root / ATTEMPT / FILE).read_bytes() == two_hosts.file_bytes()


def test_a_travel_file_is_not_synced_where_it_can_be_read_at_once(root: Path) -> None:
    """A sync waits for the disk, and after a power loss nobody needs the file."""
    gate = Count()
    Rank(root, 1, TWO_HOSTS, storage=watched(LocalStorage(root), gate)).writer.run({})
    assert gate.calls["write"] == 1 and gate.calls["sync"] == 0


def test_the_failure_of_a_rank_whose_bytes_are_awaited_is_raised(root: Path) -> None:
    rank = Rank(root, 0, TWO_HOSTS)
    rank.mailbox.post_report(1, RankReport(PLAN, failure=Failure("StorageError", "the disk is full")))
    with pytest.raises(StorageError, match="the disk is full"):
        rank.writer.run({})


def test_an_outcome_ends_every_wait(root: Path) -> None:
    rank = Rank(root, 0, TWO_HOSTS)
    rank.mailbox.post_outcome(Outcome(Failure("StorageError", "the disk is full")))
    with pytest.raises(PeerFailed, match="another rank failed"):
        rank.writer.run({})


def test_a_stopped_heartbeat_ends_the_writing(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    rank.heart.stopped = True
    with pytest.raises(PeerFailed, match="another rank failed"):
        rank.writer.run({})
    assert rank.mailbox.report_of(0) is None


def test_the_arenas_of_neighbors_are_awaited(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    neighbor = Arena(rank.arenas[1], 4600).bytes
    seal(neighbor, "")
    threading.Timer(0.2, seal, (neighbor, ATTEMPT)).start()
    rank.writer.run({})
    assert rank.mailbox.report_of(0) == RankReport(PLAN, rank.blocks(), {})


def test_an_arena_that_is_filled_anew_spoils_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(root, 0, ONE_HOST)
    written = rank.writer._write

    def write_and_refill(*arguments: Any) -> None:
        written(*arguments)
        seal(Arena(rank.arenas[1], 4600).bytes, ".attempt-later")

    monkeypatch.setattr(rank.writer, "_write", write_and_refill)
    with pytest.raises(PeerFailed, match="filled anew"):
        rank.writer.run({})
    assert rank.mailbox.report_of(0) is None and not rank.card.exists()


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, text: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(arena_card, "replace_text", refuse)


@pytest.mark.usefixtures("full_memory")
def test_without_memory_for_a_card_the_state_is_written_and_an_older_card_deleted(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    rank.card.write_text("the card of an older state")
    rank.writer.run(VALUES)
    assert rank.mailbox.report_of(0) == RankReport(PLAN, rank.blocks(), VALUES) and not rank.card.exists()


@pytest.mark.usefixtures("full_memory")
def test_without_memory_for_a_card_a_state_is_not_kept(root: Path) -> None:
    assert Rank(root, 0, ONE_HOST).writer.keep_in_memory(VALUES) is False


def test_a_closed_workspace_holds_no_arena(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    assert all(map(is_held, rank.arenas.values()))
    rank.workspace.close()
    assert not any(map(is_held, rank.arenas.values()))


def test_memory_that_differs_from_its_card_is_neither_written_nor_kept(root: Path) -> None:
    reports = Rank(root, 0, ONE_HOST).blocks()
    rank = Rank(root, 0, ONE_HOST, reports=reports)
    rank.change_byte()
    with pytest.raises(Damaged, match="is not what was captured"):
        rank.writer.run({})
    assert rank.writer.keep_in_memory({}) is False and not rank.card.exists()


def test_an_arena_that_differs_from_its_digest_is_neither_written_nor_kept(root: Path) -> None:
    rank = Rank(root, 0, TWO_HOSTS, arena_digest="0" * 32)
    with pytest.raises(Damaged, match="its digest differs"):
        rank.writer.run({})
    assert rank.writer.keep_in_memory({}) is False and not rank.card.exists()


def test_a_state_that_could_not_be_written_is_kept_with_its_digests(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    assert rank.writer.keep_in_memory(VALUES)
    card = Card.read(rank.card)
    assert (card.reports, card.values, card.arena_digest) == (rank.blocks(), VALUES, "")


def test_bytes_of_another_host_have_no_digest_so_the_arena_has_one(root: Path) -> None:
    rank = Rank(root, 0, TWO_HOSTS)
    assert rank.writer.keep_in_memory({})
    card = Card.read(rank.card)
    assert card.reports == () and card.arena_digest == digest_hex(rank.workspace.arenas[0].tobytes())
    assert Rank(root, 0, TWO_HOSTS, arena_digest=card.arena_digest).writer.keep_in_memory({})


@pytest.mark.parametrize("missing", [0, 1])
def test_a_state_that_was_not_captured_is_not_kept(root: Path, missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_attempt, "_NEIGHBOUR_S", 0.05)
    rank = Rank(root, 0, ONE_HOST)
    seal(Arena(rank.arenas[missing], 4600).bytes, "")
    assert rank.writer.keep_in_memory({}) is False and not rank.card.exists()


def test_without_the_identity_of_its_root_a_state_is_not_kept(root: Path) -> None:
    rank = Rank(root, 0, ONE_HOST)
    rank.workspace.root = ""
    assert rank.writer.keep_in_memory({}) is False and not rank.card.exists()


def test_a_failure_is_reported(root: Path) -> None:
    rank = Rank(root, 1, ONE_HOST)
    rank.writer.report_failure(StorageError("the disk is full"))
    assert rank.mailbox.report_of(1) == RankReport(PLAN, failure=Failure("StorageError", "the disk is full"))


def test_buffers_of_large_blocks_limit_the_threads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(root, 0, ONE_HOST)
    blocks = list(rank.workspace.job.blocks)
    assert rank.writer._threads(blocks) == 2
    monkeypatch.setattr(write_attempt, "_BUFFERS_BYTES", 1)
    assert rank.writer._threads(blocks) == 1, "one, whatever its size"
    direct = [block for block in two_hosts.job(1, TWO_HOSTS).blocks if not block.remote]
    assert rank.writer._threads(direct) == 2, "blocks without buffers do not count"
