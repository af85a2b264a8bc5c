"""Gathering: the bytes of a block from arenas and travel files, without storage or mailbox."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint.shared_memory import Arena, open_reader
from holdfast.core.errors import HoldfastError
from holdfast.plan.writer_job import BlockJob, Copy, WriterJob
from holdfast.writer.gather import Bytes, Gatherer, copy_bytes, is_direct
from tests.writer import two_hosts


def arenas(folder: Path, hosts: tuple[int, ...]) -> dict[int, Bytes]:
    out = {}
    for rank in (0, 1):
        path = folder / f"arena-{rank}"
        two_hosts.fill_arena(path, rank, hosts)
        out[rank] = Arena(str(path), path.stat().st_size, writable=False).bytes
    return out


def file_bytes(job: WriterJob, gatherer: Gatherer) -> bytes:
    blocks = sorted(job.blocks, key=lambda block: block.offset)
    return b"".join(b"".join(gatherer.block(block)) for block in blocks)


def test_strided_copies_of_two_arenas_make_the_file(tmp_path: Path) -> None:
    jobs = [two_hosts.job(rank, (0, 0)) for rank in (0, 1)]
    blocks = tuple(block for job in jobs for block in job.blocks)
    assert any(not copy.flat for block in blocks for copy in block.local), "there must be strides"
    gatherer = Gatherer(arenas(tmp_path, (0, 0)), {})
    assert file_bytes(replace(jobs[0], blocks=blocks), gatherer) == two_hosts.file_bytes()


def test_bytes_of_another_host_come_from_its_travel_file(tmp_path: Path) -> None:
    memory = arenas(tmp_path, (0, 1))
    (travel,) = two_hosts.job(1).travel
    area = np.zeros(travel.size, dtype=np.uint8)
    for copy in travel.copies:
        copy_bytes(copy, memory[1], area)
    (tmp_path / "travel").write_bytes(area.tobytes())
    gatherer = Gatherer({0: memory[0]}, {1: open_reader(str(tmp_path / "travel"))})
    assert file_bytes(two_hosts.job(0), gatherer) == two_hosts.file_bytes()


def flat_copy(rank: int, source: int, target: int, size: int) -> Copy:
    return Copy(rank, source, target, 1, (size,), (1,), (1,))


MEMORY = {0: np.arange(16, dtype=np.uint8), 1: np.arange(100, 116, dtype=np.uint8)}
DIRECT = BlockJob("f", 64, 10, b"hd", (flat_copy(1, 4, 6, 4), flat_copy(0, 8, 2, 4)), ())


def test_contiguous_ranges_are_views_of_the_arenas() -> None:
    assert is_direct(DIRECT)
    parts = Gatherer(MEMORY, {}).block(DIRECT)
    assert b"".join(parts) == b"hd" + bytes([8, 9, 10, 11, 104, 105, 106, 107])
    assert np.shares_memory(np.frombuffer(parts[1], dtype=np.uint8), MEMORY[0]), "nothing is copied"


def test_a_hole_between_ranges_is_an_error() -> None:
    block = replace(DIRECT, local=DIRECT.local[:1])
    with pytest.raises(HoldfastError, match="f at 66: no rank provides these bytes"):
        Gatherer(MEMORY, {}).block(block)


def test_a_block_that_ends_early_is_an_error() -> None:
    with pytest.raises(HoldfastError, match="f at 64: gathered 10 of 12 bytes"):
        Gatherer(MEMORY, {}).block(replace(DIRECT, size=12))


def test_a_larger_block_gets_a_larger_buffer() -> None:
    strided = Copy(0, 0, 0, 1, (2, 2), (8, 1), (2, 1))
    small = BlockJob("f", 0, 4, b"", (strided,), ())
    large = BlockJob("f", 4, 8, b"", (Copy(0, 0, 0, 1, (2, 4), (8, 1), (4, 1)),), ())
    gatherer = Gatherer(MEMORY, {})
    assert b"".join(gatherer.block(small)) == bytes([0, 1, 8, 9])
    assert b"".join(gatherer.block(large)) == bytes([0, 1, 2, 3, 8, 9, 10, 11])
    assert b"".join(gatherer.block(small)) == bytes([0, 1, 8, 9]), "and the buffer serves smaller blocks"
