"""A captured checkpoint: its files are read from the arenas of its ranks, and it has no others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import Damaged, NotFound
from holdfast.core.names import MANIFEST
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import digest_hex
from holdfast.storage.base import MemoryReader
from holdfast.storage.open_files import OpenReaders
from holdfast.writer.arena_card import Card
from holdfast.writer.arena_fragments import is_direct
from holdfast.writer.captured_checkpoint import CapturedFile, CapturedStorage
from tests.writer import two_hosts
from tests.writer.two_hosts import ATTEMPT

FILE = "model-00001-of-00001.safetensors"
ONE_HOST = (0, 0)


@pytest.fixture
def storage(tmp_path: Path) -> CapturedStorage:
    """The state that two ranks of a host captured and never wrote."""
    cards, whole = [], two_hosts.file_bytes()
    for rank in (0, 1):
        arena, job = tmp_path / f"arena-{rank}", two_hosts.job(rank, ONE_HOST)
        two_hosts.fill_arena(arena, rank, ONE_HOST)
        blocks = [(block.offset, block.size) for block in job.blocks]
        reports = tuple(BlockReport(FILE, at, size, digest_hex(whole[at : at + size])) for at, size in blocks)
        commit = two_hosts.commit(ONE_HOST) if rank == 0 else None
        cards.append(Card(ATTEMPT, Lineage(3), rank, str(arena), job, commit, reports, {}, "", "here"))
    return CapturedStorage(cards)


def test_a_file_is_read_across_the_blocks_of_both_ranks(storage: CapturedStorage) -> None:
    file, whole = storage.open(FILE), two_hosts.file_bytes()
    assert bytes(file.map(0, file.size)) == whole
    first, second = bytearray(20), bytearray(150)
    file.read_into(120, [memoryview(first), memoryview(second)])
    assert first + second == whole[120:290]


@pytest.mark.timeout(60)
def test_several_threads_read_a_file_at_once(storage: CapturedStorage) -> None:
    file, whole = storage.open(FILE), two_hosts.file_bytes()
    assert isinstance(file, MemoryReader)
    wrong: list[tuple[int, int]] = []

    def read(tasks: Iterator[int]) -> None:
        for seed in tasks:
            rng = random.Random(seed)
            for _ in range(200):
                begin = rng.randrange(len(whole))
                size = rng.randint(1, len(whole) - begin)
                if bytes(file.map(begin, size)) != whole[begin : begin + size]:
                    wrong.append((begin, size))

    run_on_threads(4, "test", range(8), read)
    assert wrong == []


def test_a_thread_takes_the_memory_of_one_gathered_block(storage: CapturedStorage) -> None:
    file = storage.open(FILE)
    assert isinstance(file, CapturedFile)
    gathered = [block.size for rank in (0, 1) for block in two_hosts.job(rank, ONE_HOST).blocks if not is_direct(block)]
    assert gathered and file.thread_bytes > max(gathered)
    files = OpenReaders(storage.open)
    assert files.most_threads([FILE], 8, 10**9) == 8
    assert files.most_threads([FILE], 8, file.thread_bytes) == 1
    assert files.most_threads([MANIFEST], 8, 10**9) == 1
    files.close()


@pytest.mark.timeout(20)
def test_a_read_past_the_end_of_a_file_is_damage(storage: CapturedStorage) -> None:
    file = storage.open(FILE)
    with pytest.raises(Damaged, match=f"ends at {file.size}, 4 bytes too early"):
        file.map(file.size - 8, 12)


def test_a_small_file_is_read_and_mapped(storage: CapturedStorage) -> None:
    manifest, text = storage.open(MANIFEST), storage.read(MANIFEST, 1 << 20)
    assert bytes(manifest.map(10, 30)) == text[10:40]
    first, second = bytearray(5), bytearray(7)
    manifest.read_into(3, [memoryview(first), memoryview(second)])
    assert first + second == text[3:15]


def test_its_files_are_copied_rather_than_mapped(storage: CapturedStorage) -> None:
    assert {name: storage.open(name).mappable for name in (FILE, MANIFEST)} == {FILE: False, MANIFEST: False}


def test_a_file_that_was_not_captured_is_not_found(storage: CapturedStorage) -> None:
    with pytest.raises(NotFound, match="the memory of this host has no file absent"):
        storage.open("absent")
