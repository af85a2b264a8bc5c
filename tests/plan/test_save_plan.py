"""Save plans: replicas once, balance, owners at home."""

from __future__ import annotations

from collections import Counter
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan import save_plan
from holdfast.plan.coverage import Holding, cells_of
from holdfast.plan.files import (
    FilePlan,
    Place,
    ShardPiece,
    TensorRun,
    TensorSpec,
    aligned_buffer,
    bytes_of,
    piece_in_run,
    split_group,
)
from holdfast.plan.save_plan import BlockPlan, SavePlan, plan_save
from tests.plan.layouts import Layout, holding, layouts

F4 = dtype_named("float32")
MIB = 1 << 20


def plan_of(shape: tuple[int, ...], held: list[tuple[int, Box]], hosts: list[int], block_bytes: int) -> SavePlan:
    files = split_group("model", [TensorSpec("w", F4, shape)], 1 << 40)
    boxes = [box for _, box in held]
    holding = Holding(tuple(cells_of(shape, boxes, "w")), tuple(rank for rank, _ in held), tuple(boxes))
    return plan_save(files, lambda place: holding, hosts, block_bytes)


def test_files_that_are_written_whole_take_turns_and_stay_with_most_of_their_bytes() -> None:
    shape = (1000, 1001)
    files = split_group("model", [TensorSpec(f"w{number}", F4, shape) for number in range(8)], MIB)
    assert len(files) == 8
    rows = [Box((rank * 250, 0), (250, 1001)) for rank in range(4)]
    even = Holding(tuple(cells_of(shape, rows, "w")), (0, 1, 2, 3), tuple(rows))
    owners = [block.owner for block in plan_save(files, lambda place: even, [0, 0, 1, 1], MIB, whole_files=True).blocks]
    assert Counter(owners) == Counter(dict.fromkeys(range(4), 8)), "four blocks to a file, two files to a rank"
    most = [Box((0, 0), (900, 1001)), Box((900, 0), (100, 1001))]
    uneven = Holding(tuple(cells_of(shape, most, "w")), (2, 0), tuple(most))
    plan = plan_save(files, lambda place: uneven, [0, 0, 1, 1], MIB, whole_files=True)
    assert {block.owner for block in plan.blocks} == {2}


def written(plan: SavePlan) -> Counter[int]:
    out: Counter[int] = Counter()
    for block in plan.blocks:
        out[block.owner] += block.size
    return out


def test_replicas_are_shared_out_evenly() -> None:
    full = Box.full((64, 1024))
    plan = plan_of((64, 1024), [(rank, full) for rank in range(4)], [0] * 4, 4096)
    shares = written(plan)
    assert max(shares.values()) - min(shares.values()) <= 2 * 4096
    assert all(piece.rank == block.owner for block in plan.blocks for piece in block.pieces), "nothing needs to move"


def test_rows_are_written_by_who_holds_them() -> None:
    rows = [(rank, Box((rank * 256, 0), (256, 1024))) for rank in range(4)]
    plan = plan_of((1024, 1024), rows, [0] * 4, 64 * 1024)
    moved = sum(piece.bytes for block in plan.blocks for piece in block.pieces if piece.rank != block.owner)
    assert moved < 4 * 64 * 1024
    assert max(written(plan).values()) <= MIB + 2 * 64 * 1024


def test_blocks_are_cut_where_hosts_meet_and_only_pages_travel() -> None:
    rows = [(rank, Box((rank * 250, 0), (250, 1001))) for rank in range(4)]
    plan = plan_of((1000, 1001), rows, [0, 1, 2, 3], MIB)
    assert all(block.offset % 4096 == 0 for block in plan.blocks)
    travelled = sum(piece.bytes for block in plan.blocks for piece in block.pieces if piece.rank != block.owner)
    assert 0 < travelled < 3 * 4096
    assert len(plan.blocks) > len(plan_of((1000, 1001), rows, [0] * 4, MIB).blocks)


def test_on_one_host_cuts_do_not_depend_on_the_layout() -> None:
    rows = [(rank, Box((rank * 250, 0), (250, 1001))) for rank in range(4)]
    columns = [(0, Box((0, 0), (1000, 500))), (1, Box((0, 500), (1000, 501)))]
    cuts = [[(b.offset, b.size) for b in plan_of((1000, 1001), held, [0] * 4, MIB).blocks] for held in (rows, columns)]
    assert cuts[0] == cuts[1]


def test_replicas_on_two_hosts_travel_nowhere() -> None:
    full = Box.full((1000, 1001))
    plan = plan_of((1000, 1001), [(rank, full) for rank in range(4)], [0, 0, 1, 1], MIB)
    assert all(piece.rank == block.owner for block in plan.blocks for piece in block.pieces)
    assert len(written(plan)) == 4


def assembled(layout: Layout, plan: SavePlan) -> dict[str, bytes]:
    """The files that the blocks make, each from its header and its pieces."""
    out = {file.name: bytearray() for file in layout.files}
    for block in sorted(plan.blocks, key=lambda block: block.offset):
        assert len(out[block.file]) == block.offset, "blocks follow each other"
        buffer = aligned_buffer(block.size)
        buffer[: len(block.header)] = np.frombuffer(block.header, np.uint8)
        assert len(block.header) + sum(piece.bytes for piece in block.pieces) == block.size
        for piece in block.pieces:
            assert piece.held.contains(piece.part)
            shard = layout.shard(piece.run.place, piece.held)
            piece_in_run(buffer, piece)[...] = shard[piece.part.within(piece.held)]
        out[block.file] += bytes(bytes_of(buffer))
    return {name: bytes(data) for name, data in out.items()}


@settings(max_examples=100)
@given(layouts(), st.integers(1, 40), st.booleans())
def test_blocks_make_the_files_on_any_layout(layout: Layout, words: int, whole_files: bool) -> None:
    with mock.patch.object(save_plan, "PAGE_BYTES", 16):
        plan = plan_save(layout.files, layout.holding_of, layout.hosts, 8 * words, whole_files=whole_files)
    assert assembled(layout, plan) == {file.name: layout.content(file) for file in layout.files}
    owners = {(block.file, block.owner) for block in plan.blocks}
    assert len(owners) == len(layout.files) or not whole_files


@settings(max_examples=100)
@given(layouts(), st.integers(1, 40), st.booleans())
def test_a_rank_plans_its_blocks_as_all_others_do(layout: Layout, words: int, whole_files: bool) -> None:
    with mock.patch.object(save_plan, "PAGE_BYTES", 16):
        every = plan_save(layout.files, layout.holding_of, layout.hosts, 8 * words, whole_files=whole_files)
        for rank in range(len(layout.hosts)):
            own = plan_save(
                layout.files,
                layout.holding_of,
                layout.hosts,
                8 * words,
                only={rank},
                is_relevant=partial(layout.holds, rank),
                whole_files=whole_files,
            )
            involved = [b for b in every.blocks if b.owner == rank or any(piece.rank == rank for piece in b.pieces)]
            assert list(own.blocks) == involved


U1 = dtype_named("uint8")


def file_of(*specs: TensorSpec, number: int = 0, header: bytes = b"", group: str = "model") -> FilePlan:
    """A file of tensors that follow each other after a header of any bytes."""
    name, places, at = f"{group}-{number}", [], len(header)
    for spec in specs:
        places.append(Place(spec, name, at))
        at += spec.bytes
    return FilePlan(name, number, header, at, tuple(places))


def cuts(held: list[tuple[int, Box]], hosts: list[int], pages: int) -> list[tuple[int, int]]:
    """Where the blocks of a tensor of so many pages begin, in pages, and their owners."""
    shape = (pages * 4096,)
    plan = plan_save([file_of(TensorSpec("w", U1, shape))], lambda place: holding(shape, held), hosts, MIB)
    return [(block.offset // 4096, block.owner) for block in plan.blocks]


def pages_of(begin: int, end: int) -> Box:
    return Box((begin * 4096,), ((end - begin) * 4096,))


def test_a_block_is_cut_only_where_no_host_holds_both_sides() -> None:
    assert cuts([(0, pages_of(0, 2)), (1, pages_of(1, 3))], [0, 1], 3) == [(0, 0), (2, 1)]
    assert cuts([(0, pages_of(0, 1)), (1, pages_of(0, 3))], [0, 1], 3) == [(0, 1)]
    assert cuts([(0, pages_of(0, 1)), (1, pages_of(1, 2)), (0, pages_of(2, 3))], [0, 1], 3) == [(0, 0), (1, 1), (2, 0)]


def test_a_part_shorter_than_a_page_is_not_worth_a_cut() -> None:
    short = [(0, Box((0,), (4096,))), (1, Box((4096,), (4095,))), (0, Box((8191,), (4097,)))]
    assert cuts(short, [0, 1], 3) == [(0, 0)]


def test_a_header_of_several_pages_is_not_cut_by_itself() -> None:
    file = file_of(TensorSpec("w", U1, (4096,)), header=bytes(3 * 4096))
    one = holding((4096,), [(0, Box.full((4096,)))])
    assert [block.offset for block in plan_save([file], lambda place: one, [0, 1], MIB).blocks] == [0]


def test_a_rank_asks_for_no_holders_of_tensors_in_blocks_of_others() -> None:
    file = file_of(TensorSpec("a", U1, (64,)), TensorSpec("b", U1, (64,)), TensorSpec("c", U1, (64,)))
    asked = set()

    def holding_of(place: Place) -> Holding:
        asked.add(place.spec.key)
        return holding((64,), [("abc".index(place.spec.key), Box.full((64,)))])

    plan = plan_save([file], holding_of, [0, 0, 0], 64, only={1}, is_relevant=lambda place: place.spec.key == "b")
    assert [(block.offset, block.owner) for block in plan.blocks] == [(64, 1)] and asked == {"b"}


def columns(*widths: int) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor of bytes, 32 rows of columns of these widths."""
    ends = np.cumsum(widths).tolist()
    return (32, ends[-1]), [Box((0, end - width), (32, width)) for end, width in zip(ends, widths, strict=True)]


def owners(widths: list[int], ranks: list[int], hosts: list[int]) -> Counter[int]:
    """How many rows each rank writes, where the rows are blocks."""
    shape, boxes = columns(*widths)
    held = holding(shape, list(zip(ranks, boxes, strict=True)))
    blocks = plan_save([file_of(TensorSpec("w", U1, shape))], lambda place: held, hosts, shape[1]).blocks
    assert len(blocks) == 32
    return Counter(block.owner for block in blocks)


def file_owners(widths: list[int], ranks: list[int], hosts: list[int]) -> Counter[int]:
    """How many of 32 files each rank writes."""
    shape, boxes = columns(*widths)
    held = holding(shape, list(zip(ranks, boxes, strict=True)))
    files = [file_of(TensorSpec("w", U1, shape), number=number) for number in range(32)]
    blocks = plan_save(files, lambda place: held, hosts, MIB, whole_files=True).blocks
    assert len(blocks) == 32
    return Counter(block.owner for block in blocks)


def test_ranks_that_hold_half_as_much_as_another_take_their_turns() -> None:
    assert owners([8, 4], [0, 1], [0, 0]) == {0: 16, 1: 16}
    assert file_owners([8, 4], [0, 1], [0, 0]) == {0: 16, 1: 16}


def test_ranks_that_hold_less_than_half_as_much_as_another_write_nothing() -> None:
    assert owners([9, 4], [0, 1], [0, 0]) == {0: 32}
    assert file_owners([9, 4], [0, 1], [0, 0]) == {0: 32}


def test_the_host_that_holds_most_writes_though_a_rank_elsewhere_holds_more() -> None:
    assert owners([5, 4, 4], [0, 1, 2], [0, 1, 1]) == {1: 16, 2: 16}
    assert file_owners([5, 4, 4], [0, 1, 2], [0, 1, 1]) == {1: 16, 2: 16}


def test_files_are_shared_among_hosts_that_hold_nine_tenths_of_the_most() -> None:
    assert file_owners([9, 10], [0, 1], [0, 1]) == {0: 16, 1: 16}
    assert file_owners([8, 10], [0, 1], [0, 1]) == {1: 32}


def test_replicas_on_one_host_count_once() -> None:
    shape, (most, rest) = columns(5, 4)
    held = holding(shape, [(0, most), (1, rest), (2, rest)])
    file = file_of(TensorSpec("w", U1, shape))
    for whole_files in (True, False):
        plan = plan_save([file], lambda place: held, [0, 1, 1], 9, whole_files=whole_files)
        assert {block.owner for block in plan.blocks} == {0}


def test_a_file_goes_to_the_rank_with_most_bytes_and_not_most_elements() -> None:
    file = file_of(TensorSpec("wide", dtype_named("float64"), (100,)), TensorSpec("narrow", U1, (300,)))
    whole = {"wide": holding((100,), [(1, Box.full((100,)))]), "narrow": holding((300,), [(0, Box.full((300,)))])}
    for hosts in ([0, 0], [0, 1]):
        plan = plan_save([file], lambda place: whole[place.spec.key], hosts, MIB, whole_files=True)
        assert {block.owner for block in plan.blocks} == {1}


@pytest.mark.parametrize("whole_files", [False, True])
def test_files_without_tensors_are_shared_out(whole_files: bool) -> None:
    files = [file_of(TensorSpec("none", U1, (0,)), number=number, header=b"{}") for number in range(6)]
    empty = holding((0,), [(0, Box((0,), (0,)))])
    plan = plan_save(files, lambda place: empty, [0, 0, 1], MIB, whole_files=whole_files)
    assert [block.owner for block in plan.blocks] == [0, 1, 2, 0, 1, 2]
    assert {(block.offset, block.size, block.header) for block in plan.blocks} == {(0, 2, b"{}")}


def test_files_of_different_groups_begin_with_different_ranks() -> None:
    shape = (64,)
    held = holding(shape, [(rank, Box.full(shape)) for rank in range(8)])
    files = [file_of(TensorSpec("w", U1, shape), group=group) for group in ("model", "optimizer", "ema", "masters")]
    plan = plan_save(files, lambda place: held, [0] * 8, MIB, whole_files=True)
    assert len({block.owner for block in plan.blocks}) > 1


def test_turns_are_even_though_the_same_ranks_recur_with_every_second_block() -> None:
    boxes = [(rank, Box((block * 8,), (8,))) for block in range(32) for rank in ((0, 1), (2, 3))[block % 2]]
    held = holding((256,), boxes)
    plan = plan_save([file_of(TensorSpec("w", U1, (256,)))], lambda place: held, [0] * 4, 8)
    assert Counter(block.owner for block in plan.blocks) == dict.fromkeys(range(4), 8)


def test_bytes_come_from_the_owner_or_else_its_host_or_else_the_first_rank() -> None:
    shape, (most, few) = columns(9, 1)
    file = file_of(TensorSpec("w", U1, shape))

    def source_of_few(ranks: list[int], hosts: list[int]) -> int:
        held = holding(shape, [(0, most), *((rank, few) for rank in ranks)])
        (block,) = plan_save([file], lambda place: held, hosts, MIB).blocks
        assert block.owner == 0
        (found,) = (piece.rank for piece in block.pieces if piece.held == few)
        return found

    assert source_of_few([3, 1, 2, 0], [1, 0, 1, 1]) == 0
    assert source_of_few([3, 1, 2], [1, 0, 1, 1]) == 2
    assert source_of_few([3, 2, 1], [1, 0, 0, 0]) == 1


def test_exports_are_aligned_and_each_host_has_an_area_of_its_own() -> None:
    place = Place(TensorSpec("w", U1, (1000,)), "f", 0)

    def piece(rank: int, size: int) -> ShardPiece:
        box = Box((0,), (size,))
        return ShardPiece(TensorRun(place, box, 0), box, rank, Box.full((1000,)))

    pieces = [piece(0, size) for size in (5, 70, 64, 1, 9)]
    blocks = (
        BlockPlan("f", 0, 9, 1, b"", (pieces[0], piece(1, 3), pieces[1])),
        BlockPlan("f", 9, 9, 0, b"", (piece(0, 999),)),
        BlockPlan("f", 18, 9, 2, b"", (pieces[2],)),
        BlockPlan("f", 27, 9, 1, b"", (pieces[3],)),
        BlockPlan("f", 36, 9, 2, b"", (pieces[4],)),
    )
    found = SavePlan((), blocks, (0, 0, 7)).exports(0)
    assert {host: [(each.piece.bytes, each.offset) for each in area] for host, area in found.items()} == {
        0: [(5, 0), (70, 64), (1, 192)],
        7: [(64, 0), (9, 64)],
    }
    assert [each.end for each in found[0]] == [5, 134, 193]


def plans_of_each_rank(file: FilePlan, held: dict[str, Holding], hosts: list[int], size: int) -> list[list[int]]:
    """The offsets of the blocks that each rank plans for itself."""
    plans = (
        plan_save([file], lambda place: held[place.spec.key], hosts, size, only={rank}) for rank in range(len(hosts))
    )
    return [[block.offset for block in plan.blocks] for plan in plans]


def test_a_rank_that_holds_one_element_of_a_block_plans_the_block() -> None:
    held = {"w": holding((9,), [(0, Box((0,), (1,))), (1, Box((1,), (7,))), (2, Box((8,), (1,)))])}
    file = file_of(TensorSpec("w", U1, (9,)), header=b"header")
    assert plans_of_each_rank(file, held, [0, 1, 2], MIB) == [[0], [0], [0]]


def test_a_rank_that_holds_columns_plans_the_blocks_that_others_hold_rows_of() -> None:
    columns_of = holding((4, 2), [(1, Box((0, 0), (4, 1))), (2, Box((0, 1), (4, 1)))])
    held = {"a": holding((8,), [(0, Box.full((8,)))]), "b": columns_of}
    file = file_of(TensorSpec("a", U1, (8,)), TensorSpec("b", U1, (4, 2)))
    assert plans_of_each_rank(file, held, [0, 1, 2], MIB) == [[0], [0], [0]]


def test_a_rank_plans_the_later_blocks_of_a_tensor_that_it_holds_the_end_of() -> None:
    held = {"w": holding((64,), [(0, Box((0,), (40,))), (1, Box((40,), (24,)))])}
    file = file_of(TensorSpec("w", U1, (64,)), header=bytes(16))
    assert plans_of_each_rank(file, held, [0, 1], 16) == [[0, 16, 32, 48], [48, 64]]
