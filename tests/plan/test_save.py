"""Save plans: replicas once, balance, owners at home."""

from __future__ import annotations

from collections import Counter

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.coverage import Holding, cells_of
from holdfast.plan.files import TensorSpec, split_group
from holdfast.plan.save import SavePlan, plan_save

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
