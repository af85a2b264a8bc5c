"""Cards and arenas that somebody else may have put there are not believed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.shared_memory import find_files, read_private
from holdfast.core.errors import HoldfastError
from holdfast.plan.writer_job import WriterJob
from holdfast.writer.arena_card import Card, card_path, read_cards


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


def test_links_in_shared_memory_are_not_found(tmp_path: Path) -> None:
    name = secrets.token_hex(16)
    link = Path("/dev/shm") / f"holdfast-{name}-0"
    link.symlink_to(tmp_path)
    try:
        assert find_files(name) == []
    finally:
        link.unlink()
