"""Writer jobs: plain copies out of arenas and travel files give the bytes of the files."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan import save_plan, writer_job
from holdfast.plan.files import Place, RawArray, ShardPiece, TensorRun, TensorSpec, bytes_of
from holdfast.plan.save_plan import BlockPlan, SavePlan, plan_save
from holdfast.plan.writer_job import (
    SEAL_BYTES,
    ArenaLayout,
    ArenaSpan,
    BlockJob,
    Copy,
    TravelJob,
    WriterJob,
    is_travel_file,
    travel_file,
)
from tests.plan.layouts import Layout, layouts


def carry_out(copy: Copy, source: RawArray, target: RawArray) -> None:
    """Copy element by element, as a copy is described."""
    for index in itertools.product(*map(range, copy.sizes)):
        begin = copy.source + sum(at * stride for at, stride in zip(index, copy.source_strides, strict=True))
        to = copy.target + sum(at * stride for at, stride in zip(index, copy.target_strides, strict=True))
        assert begin + copy.item <= len(source) and to + copy.item <= len(target)
        target[to : to + copy.item] = source[begin : begin + copy.item]


def filled(arena: ArenaLayout, layout: Layout) -> RawArray:
    out = np.zeros(arena.size, np.uint8)
    for span in arena.spans:
        elements = layout.shard(span.place, span.held).reshape(-1)[span.begin : span.end]
        out[span.offset : span.offset + span.bytes] = np.frombuffer(bytes_of(elements), np.uint8)
    return out


def written(layout: Layout, jobs: list[WriterJob], arenas: Mapping[int, RawArray]) -> dict[str, bytes]:
    """The files that the writers of all ranks make together."""
    travelled: dict[tuple[int, int], RawArray] = {}
    for job in jobs:
        for travel in job.travel:
            buffer = travelled[job.rank, travel.host] = np.zeros(travel.size, np.uint8)
            for copy in travel.copies:
                carry_out(copy, arenas[copy.source_rank], buffer)
    files = {file.name: np.zeros(file.size, np.uint8) for file in layout.files}
    for job in jobs:
        for block in job.blocks:
            target = files[block.file][block.offset : block.offset + block.size]
            target[: len(block.header)] = np.frombuffer(block.header, np.uint8)
            for copy in block.local:
                assert layout.hosts[copy.source_rank] == job.host
                carry_out(copy, arenas[copy.source_rank], target)
            for copy in block.remote:
                assert layout.hosts[copy.source_rank] != job.host
                carry_out(copy, travelled[copy.source_rank, job.host], target)
    return {name: data.tobytes() for name, data in files.items()}


@settings(max_examples=80)
@given(layouts(), st.integers(1, 40), st.booleans())
def test_the_writers_of_all_ranks_write_the_files(layout: Layout, words: int, whole_files: bool) -> None:
    with mock.patch.object(save_plan, "PAGE_BYTES", 16):
        plan = plan_save(layout.files, layout.holding_of, layout.hosts, 8 * words, whole_files=whole_files)
    arenas = [ArenaLayout(plan, rank) for rank in range(len(layout.hosts))]
    jobs = []
    for rank, host in enumerate(layout.hosts):
        beside = {member: arena for member, arena in enumerate(arenas) if layout.hosts[member] == host}
        job = writer_job.writer_job(plan, "d", rank, beside)
        assert WriterJob.from_fields(json.loads(json.dumps(job.fields()))).fields() == job.fields()
        assert (job.plan, job.rank, job.world, job.host) == ("d", rank, len(layout.hosts), host)
        assert job.hosts == len(set(layout.hosts))
        assert job.arena_bytes == {member: arena.size for member, arena in beside.items()}
        assert job.source_ranks == sorted({copy.source_rank for block in job.blocks for copy in block.remote})
        jobs.append(WriterJob.from_fields(job.fields()))
    assert sum(job.bytes for job in jobs) == sum(file.size for file in layout.files)
    found = written(layout, jobs, {rank: filled(arena, layout) for rank, arena in enumerate(arenas)})
    assert found == {file.name: layout.content(file) for file in layout.files}


@settings(max_examples=80)
@given(layouts(), st.integers(1, 40))
def test_the_spans_of_an_arena_are_aligned_disjoint_and_tight(layout: Layout, words: int) -> None:
    plan = plan_save(layout.files, layout.holding_of, layout.hosts, 8 * words)
    for rank in range(len(layout.hosts)):
        arena = ArenaLayout(plan, rank)
        at = SEAL_BYTES
        for span in arena.spans:
            assert span.offset == at
            at += (span.bytes + 511) // 512 * 512
        assert arena.size == at


def piece(place: Place, begin: int, size: int, held: Box | None = None) -> ShardPiece:
    part = Box((begin,), (size,))
    return ShardPiece(TensorRun(place, part, 0), part, 0, held or Box.full(place.spec.shape))


def place_of(key: str, *shape: int, dtype: str = "uint16") -> Place:
    return Place(TensorSpec(key, dtype_named(dtype), shape), "f", 0)


def arena_of(*pieces: ShardPiece) -> ArenaLayout:
    return ArenaLayout(SavePlan((), (BlockPlan("f", 0, 0, 0, b"", pieces),), (0,)), 0)


def ranges(arena: ArenaLayout) -> list[tuple[int, int]]:
    return [(span.begin, span.end) for span in arena.spans]


def test_an_arena_has_just_the_ranges_that_are_needed() -> None:
    place = place_of("w", 20)
    pieces = [piece(place, 1, 2), piece(place, 3, 2), piece(place, 8, 2), piece(place, 15, 5)]
    assert ranges(arena_of(*pieces)) == [(1, 5), (8, 10), (15, 20)]


def test_ranges_that_overlap_are_held_once() -> None:
    place = place_of("w", 20)
    assert ranges(arena_of(piece(place, 2, 8), piece(place, 4, 2), piece(place, 6, 6))) == [(2, 12)]


def test_each_piece_is_located_in_the_range_that_holds_it() -> None:
    place = place_of("w", 20)
    pieces = [piece(place, 15, 5), piece(place, 0, 1), piece(place, 1, 3), piece(place, 8, 2), piece(place, 9, 1)]
    arena = arena_of(*pieces)
    spans = {span.begin: span.offset for span in arena.spans}
    assert [arena.locate(each) for each in pieces] == [spans[15], spans[0], spans[0] + 2, spans[8], spans[8] + 2]


def test_a_part_of_columns_needs_the_range_from_its_first_element_to_its_last() -> None:
    place = place_of("w", 6, 6)
    held = Box((2, 1), (4, 5))
    part = Box((3, 2), (2, 3))
    arena = arena_of(ShardPiece(TensorRun(place, Box.full((6, 6)), 0), part, 0, held))
    assert ranges(arena) == [(6, 14)]


def test_pieces_of_other_ranks_are_not_in_the_arena() -> None:
    place = place_of("w", 4)
    other = ShardPiece(TensorRun(place, Box((0,), (2,)), 0), Box((0,), (2,)), 1, Box((0,), (2,)))
    assert ranges(arena_of(other, piece(place, 2, 2))) == [(2, 4)]


def test_single_numbers_come_first_then_small_spans_then_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_job, "_SMALL_BYTES", 8)
    pieces = [piece(place_of(key, size), 0, size) for key, size in (("l", 9), ("s", 2), ("n", 1), ("k", 4), ("m", 1))]
    assert [span.place.spec.key for span in arena_of(*pieces).spans] == ["n", "m", "s", "l", "k"]


def test_a_span_is_small_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_job, "_SMALL_BYTES", 8)
    place = place_of("w", 20)
    assert [ArenaSpan(place, Box.full((20,)), 2, end, 0).is_small for end in (5, 6)] == [True, False]


FLAT = Copy(1, 10, 20, 4, (3,), (4,), (4,))
STRIDED = Copy(1, 10, 20, 4, (3,), (8,), (4,))
SPREAD = Copy(1, 10, 20, 4, (3,), (8,), (8,))
DEEP = Copy(1, 10, 20, 4, (2, 3), (40, 4), (20, 4))


@pytest.mark.parametrize(("copy", "flat"), [(FLAT, True), (STRIDED, False), (SPREAD, False), (DEEP, False)])
def test_a_copy_is_flat_if_both_sides_are_one_range(copy: Copy, flat: bool) -> None:
    assert copy.flat is flat


def test_a_copy_of_one_element_is_flat() -> None:
    copy = Copy(1, 10, 20, 4, (), (), ())
    assert copy.flat and Copy.from_fields(copy.fields()).bytes == copy.bytes == 4


@pytest.mark.parametrize("copy", [FLAT, STRIDED, SPREAD, DEEP])
def test_a_copy_that_was_sent_moves_the_same_bytes(copy: Copy) -> None:
    source = np.arange(120, dtype=np.uint8)
    sent = Copy.from_fields(json.loads(json.dumps(copy.fields())))
    assert (sent.source_rank, sent.bytes) == (copy.source_rank, copy.bytes)
    targets = [np.zeros(120, np.uint8) for _ in range(2)]
    for each, target in zip((copy, sent), targets, strict=True):
        carry_out(each, source, target)
    assert np.array_equal(targets[0], targets[1])


def test_a_flat_copy_is_sent_as_four_numbers() -> None:
    assert FLAT.fields() == [1, 10, 20, 12]


def test_a_job_that_was_sent_is_equal() -> None:
    flat = Copy(0, 10, 20, 1, (12,), (1,), (1,))
    blocks = (BlockJob("f", 4, 8, b"\xff{", (flat, DEEP), (STRIDED,)), BlockJob("g", 0, 9, b"", (), (DEEP,)))
    job = WriterJob("d", 1, 3, 0, 2, {0: 512, 1: 1024}, blocks, (TravelJob(1, 77, (SPREAD, flat)),))
    assert WriterJob.from_fields(json.loads(json.dumps(job.fields()))) == job
    assert base64.b64decode(blocks[0].fields()[3]) == b"\xff{"
    assert (job.bytes, job.source_ranks) == (17, [1])


def test_rows_that_follow_each_other_on_both_sides_are_one_flat_copy() -> None:
    place = place_of("w", 6, 4)
    held = Box((2, 0), (4, 4))
    part = Box((3, 0), (2, 4))
    run = TensorRun(place, Box((1, 0), (5, 4)), 100)
    plan = SavePlan((), (BlockPlan("f", 0, 200, 0, b"", (ShardPiece(run, part, 0, held),)),), (0,))
    arena = ArenaLayout(plan, 0)
    ((copy,),) = (block.local for block in writer_job.writer_job(plan, "d", 0, {0: arena}).blocks)
    assert copy.flat
    assert (copy.source, copy.target, copy.bytes) == (SEAL_BYTES, 100 + 2 * 4 * 2, 2 * 4 * 2)


def test_columns_are_copied_with_the_strides_of_both_sides() -> None:
    place = place_of("w", 6, 4, 2)
    held, part = Box((0, 1, 0), (6, 3, 2)), Box((2, 1, 0), (3, 2, 2))
    run = TensorRun(place, Box((2, 0, 0), (3, 4, 2)), 0)
    plan = SavePlan((), (BlockPlan("f", 0, 200, 0, b"", (ShardPiece(run, part, 0, held),)),), (0,))
    ((copy,),) = (block.local for block in writer_job.writer_job(plan, "d", 0, {0: ArenaLayout(plan, 0)}).blocks)
    assert (copy.sizes, copy.source_strides, copy.target_strides) == ((3, 4), (12, 2), (16, 2))


def test_a_travel_file_is_known_by_its_name() -> None:
    assert is_travel_file(travel_file(3, 1)) and not is_travel_file("model-00001-of-00001.safetensors")
    assert len({travel_file(rank, host) for rank in range(3) for host in range(3)}) == 9
