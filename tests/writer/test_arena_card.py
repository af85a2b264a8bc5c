"""Cards and arenas: whose they are, whether that trainer is alive, and none of a stranger's is believed."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import Arena, create_file, find_files, has_owner, read_private, unlink_file
from holdfast.core.errors import HoldfastError
from holdfast.plan.writer_job import WriterJob
from holdfast.storage.local import LocalStorage
from holdfast.writer import arena_card
from holdfast.writer.arena_card import (
    ArenaFile,
    Card,
    Process,
    arena_prefix,
    began,
    card_path,
    find_arenas,
    pid_namespace,
    read_cards,
    trainers,
)
from holdfast.writer.startup_cleanup import clean_arenas
from tests.writer.conftest import RUN


@pytest.fixture
def card(tmp_path: Path) -> Path:
    arena = str(tmp_path / "arena")
    job = WriterJob("p", 0, 1, 0, 1, {0: 4096}, (), ())
    Card(".attempt-0", Lineage(3), 0, arena, job, None, (), {}, "", "here").write()
    return Path(card_path(arena))


def test_a_card_is_read_as_it_was_written(card: Path) -> None:
    (found,) = read_cards([card])
    assert (found.step, found.rank, found.host, found.job.plan) == (3, 0, "here", "p")


def test_links_pipes_and_files_of_others_are_refused(card: Path, tmp_path: Path) -> None:
    link, pipe, open_file = tmp_path / "link.card", tmp_path / "pipe.card", tmp_path / "open.card"
    link.symlink_to(card)
    os.mkfifo(pipe, 0o600)
    open_file.write_bytes(card.read_bytes())
    open_file.chmod(0o644)
    assert read_cards([link, pipe, open_file]) == []
    with pytest.raises(HoldfastError, match="not a file that Holdfast created"):
        read_private(str(pipe), 100)


def test_a_card_of_another_arena_is_none(card: Path) -> None:
    moved = card.with_name("other.card")
    card.rename(moved)
    assert read_cards([moved]) == []


def test_a_card_that_is_no_card_is_none(card: Path) -> None:
    for text in (b"", b"{}", b'{"attempt": 1}', b"[" * 100_000):
        card.write_bytes(text)
        assert read_cards([card]) == []


NO_STEP = {"step": None, "parent": None, "metrics": {}, "abandons": [], "skips": []}
WRONG: list[dict[str, Any]] = [
    *({name: 3} for name in ("attempt", "arena_digest", "host", "root")),
    *({"rank": rank} for rank in (-1, 2**63, True, "0", None)),
    {"values": []},
    {"lineage": NO_STEP},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_card_with_a_field_of_the_wrong_kind_is_none(card: Path, wrong: dict[str, Any]) -> None:
    card.write_text(json.dumps({**json.loads(card.read_text()), **wrong}))
    assert read_cards([card]) == []


def test_links_in_shared_memory_are_not_found(tmp_path: Path) -> None:
    name = secrets.token_hex(16)
    link = Path("/dev/shm") / f"holdfast-{name}-0"
    link.symlink_to(tmp_path)
    try:
        assert find_files(name) == []
    finally:
        link.unlink()


def test_an_arena_names_the_process_that_creates_it() -> None:
    path = create_file(4096, arena_prefix(RUN, 3), in_memory=True)
    try:
        (arena,) = find_arenas(RUN)
        assert (arena.trainer, arena.began) == (Process.current(), began(os.getpid()))
        assert arena.trainer_lives() and not arena.is_orphan()
        assert ArenaFile.at(Path(f"{path}.card")) is None
    finally:
        unlink_file(path)


def test_a_later_process_with_the_same_pid_is_not_the_trainer() -> None:
    path = create_file(4096, f"{RUN}-0-{os.getpid()}-{began(os.getpid()) + 1}-{pid_namespace()}-", in_memory=True)
    try:
        assert trainers(RUN) == set()
    finally:
        unlink_file(path)


def test_an_orphan_is_held_by_a_writer_whose_trainer_is_dead(orphan: tuple[str, int]) -> None:
    (arena,) = find_arenas(RUN)
    assert arena.is_orphan() and clean_arenas(RUN) == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_trainer_of_another_namespace_is_judged_by_its_lock(alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid says nothing here: the process with that pid is this one, or none."""
    elsewhere = pid_namespace() + 1
    path = create_file(4096, f"{RUN}-0-{os.getpid()}-{began(os.getpid())}-{elsewhere}-", in_memory=True)
    memory = Arena(path, 4096, hold=True, owner=alive)
    arena = ArenaFile.at(Path(path))
    assert arena is not None
    try:
        assert has_owner(path) == alive
        assert arena.is_orphan() == (not alive)
        assert trainers(RUN) == ({Process(os.getpid(), elsewhere)} if alive else set())
        assert "of another container" in str(Process(os.getpid(), elsewhere))
        memory.close()
        assert not arena.is_orphan()
        assert clean_arenas(RUN) == [], "it may just be about to be held"
        monkeypatch.setattr(arena_card, "_NEW_S", 0.0)
        assert clean_arenas(RUN) == [None] and not find_files(RUN)
    finally:
        unlink_file(path)


def test_an_arena_that_is_gone_has_no_trainer() -> None:
    """A trainer of another container deletes its arena while this one looks for its lock."""
    arena = ArenaFile.at(Path(f"/dev/shm/holdfast-{RUN}-0-1-1-{pid_namespace() + 1}-{secrets.token_hex(16)}"))
    assert arena is not None and arena.trainer_lives() is False and not arena.is_orphan()


def test_a_process_that_has_ended_never_began() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert began(process.pid) > 0
        process.communicate(timeout=20)
    assert began(process.pid) == -1


def test_a_system_without_pid_namespaces_has_the_number_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_card, "_OWN_NAMESPACE", str(tmp_path / "absent"))
    assert pid_namespace() == 0


def test_an_arena_without_a_key_matches_nothing(tmp_path: Path) -> None:
    """A root without an identity never sees, or removes, what others have in memory."""
    assert find_files(run_id(LocalStorage(tmp_path))) == []
    assert run_id(LocalStorage(tmp_path)) != run_id(LocalStorage(tmp_path))
