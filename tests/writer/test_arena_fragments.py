"""Blocks gathered from the arenas and travel files of a writer job, without storage or mailbox."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from holdfast.checkpoint.gather import Gatherer, write_travel_file
from holdfast.checkpoint.shared_memory import Arena
from holdfast.core.errors import HoldfastError
from holdfast.plan.writer_job import BlockJob, Copy, WriterJob
from holdfast.storage.base import Reader
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_fragments import Bytes, arena_fragment, block_fragments, is_direct
from tests.writer import two_hosts


def arenas(folder: Path, hosts: tuple[int, ...]) -> dict[int, Bytes]:
    out = {}
    for rank in (0, 1):
        path = folder / f"arena-{rank}"
        two_hosts.fill_arena(path, rank, hosts)
        out[rank] = Arena(str(path), path.stat().st_size, writable=False).bytes
    return out


def gather(
    block: BlockJob, memory: Mapping[int, Bytes], travel_files: Mapping[int, Reader] = MappingProxyType({})
) -> bytes:
    return b"".join(Gatherer().block(block, block_fragments(block, memory, travel_files)))


def file_bytes(job: WriterJob, memory: Mapping[int, Bytes], travel_files: Mapping[int, Reader]) -> bytes:
    blocks = sorted(job.blocks, key=lambda block: block.offset)
    return b"".join(gather(block, memory, travel_files) for block in blocks)


def test_strided_copies_of_two_arenas_make_the_file(tmp_path: Path) -> None:
    jobs = [two_hosts.job(rank, (0, 0)) for rank in (0, 1)]
    blocks = tuple(block for job in jobs for block in job.blocks)
    assert any(not copy.flat for block in blocks for copy in block.local), "there must be strides"
    memory = arenas(tmp_path, (0, 0))
    assert file_bytes(replace(jobs[0], blocks=blocks), memory, {}) == two_hosts.file_bytes()


def test_bytes_of_another_host_come_from_its_travel_file(tmp_path: Path) -> None:
    memory = arenas(tmp_path, (0, 1))
    (travel,) = two_hosts.job(1).travel
    storage = LocalStorage(tmp_path)
    storage.begin(two_hosts.ATTEMPT)
    fragments = (arena_fragment(copy, memory[1]) for copy in travel.copies)
    write_travel_file(storage, two_hosts.ATTEMPT, "travel", travel.size, fragments)
    with closing(storage.take(two_hosts.ATTEMPT, "travel")) as travel_file:
        assert file_bytes(two_hosts.job(0), {0: memory[0]}, {1: travel_file}) == two_hosts.file_bytes()


def flat_copy(rank: int, source: int, target: int, size: int) -> Copy:
    return Copy(rank, source, target, 1, (size,), (1,), (1,))


MEMORY = {0: np.arange(16, dtype=np.uint8), 1: np.arange(100, 116, dtype=np.uint8)}
DIRECT = BlockJob("f", 64, 10, b"hd", (flat_copy(1, 4, 6, 4), flat_copy(0, 8, 2, 4)), ())


def test_contiguous_ranges_are_views_of_the_arenas() -> None:
    assert is_direct(DIRECT)
    parts = list(Gatherer().block(DIRECT, block_fragments(DIRECT, MEMORY, {})))
    assert b"".join(parts) == b"hd" + bytes([8, 9, 10, 11, 104, 105, 106, 107])
    assert np.shares_memory(np.frombuffer(parts[1], dtype=np.uint8), MEMORY[0]), "nothing is copied"


def test_a_hole_between_ranges_is_an_error() -> None:
    block = replace(DIRECT, local=DIRECT.local[:1])
    with pytest.raises(HoldfastError, match="f at 66: no rank provides these bytes"):
        gather(block, MEMORY)


def test_a_block_that_ends_early_is_an_error() -> None:
    with pytest.raises(HoldfastError, match="f at 64: gathered 10 of 12 bytes"):
        gather(replace(DIRECT, size=12), MEMORY)
