"""Layouts against numpy slicing: what ranks hold, what saves write, what loads read."""

from __future__ import annotations

import sys
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan import load_plan
from holdfast.plan.coverage import Holding, cells_of
from holdfast.plan.files import Place, TensorSpec, aligned_buffer, part_of, piece_in_run, split_group
from holdfast.plan.load_plan import StoredBlock, StoredFile, Want, plan_load
from holdfast.plan.save_plan import SavePlan, plan_save
from holdfast.testing.strategies import Sharding, shapes, shardings

U4 = dtype_named("uint32")


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)


@settings(max_examples=10_000 if "--full" in sys.argv else 1_000)
@given(st.data())
def test_parts_are_what_numpy_slices(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    sharding = data.draw(shardings(shape))
    full = numbered(shape)
    seen = np.zeros(shape, dtype=int)
    for rank in range(len(sharding.coordinates)):
        local = sharding.local(rank, full)
        filled = np.zeros(local.shape, dtype=bool)
        for part in sharding.parts(rank):
            there = local[part.local.within(Box.full(local.shape))]
            here = full[part.box.within(Box.full(shape))]
            assert np.array_equal(there.reshape(part.box.sizes), here)
            filled[part.local.within(Box.full(local.shape))] = True
            seen[part.box.within(Box.full(shape))] += 1
        assert filled.all(), "the parts do not cover the local array"
    assert (seen >= 1).all(), "the ranks do not cover the tensor"


def holding_of(sharding: Sharding) -> Holding:
    ranks, boxes = [], []
    for rank in range(len(sharding.coordinates)):
        for part in sharding.parts(rank):
            ranks.append(rank)
            boxes.append(part.box)
    return Holding(tuple(cells_of(sharding.shape, boxes, "w")), tuple(ranks), tuple(boxes))


def held_array(full: np.ndarray, box: Box) -> np.ndarray:
    return full[box.within(Box.full(full.shape))]


def check_partial_plan(
    plan: SavePlan, here: set[int], holdings: dict[Place, Holding], block_bytes: int, whole: bool
) -> None:
    """The ranks of a host plan what concerns them alone, and agree with the plan of all."""

    def concerns(place: Place) -> bool:
        return not here.isdisjoint(holdings[place].ranks)

    part = plan_save(
        plan.files, holdings.__getitem__, plan.hosts, block_bytes, only=here, is_relevant=concerns, whole_files=whole
    )
    assert part.blocks == tuple(
        block for block in plan.blocks if block.owner in here or any(piece.rank in here for piece in block.pieces)
    )


@settings(max_examples=1500 if "--full" in sys.argv else 500)
@given(st.data())
def test_a_save_plan_writes_every_byte_once_from_who_holds_it(data: st.DataObject) -> None:
    tensors = [data.draw(shapes(data.draw(st.sampled_from([9, 40])) if i == 0 else 6)) for i in range(3)]
    tensors = [shape[:2] if np.prod(shape, dtype=object) > 20_000 else shape for shape in tensors]
    fulls = {f"w{i}": numbered(shape) + np.uint32(i << 24) for i, shape in enumerate(tensors)}
    layouts = {f"w{i}": data.draw(shardings(shape)) for i, shape in enumerate(tensors)}
    world = max(len(sharding.coordinates) for sharding in layouts.values())
    hosts = [rank * data.draw(st.integers(1, 3)) // world for rank in range(world)]
    block_bytes = data.draw(st.sampled_from([64, 256, 4096, 1 << 20]))
    files = split_group("model", [TensorSpec(key, U4, full.shape) for key, full in fulls.items()], 50_000)
    holdings = {place: holding_of(layouts[place.spec.key]) for file in files for place in file.places}
    whole = data.draw(st.booleans())
    plan = plan_save(files, holdings.__getitem__, hosts, block_bytes, whole_files=whole)
    host = data.draw(st.sampled_from(sorted(set(hosts))))
    check_partial_plan(plan, {rank for rank in range(world) if hosts[rank] == host}, holdings, block_bytes, whole)
    written = {file.name: np.full(file.size, 0xEE, dtype=np.uint8) for file in files}
    covered = {file.name: np.zeros(file.size, dtype=int) for file in files}
    for block in plan.blocks:
        buffer = aligned_buffer(block.size)
        buffer[: len(block.header)] = np.frombuffer(block.header, dtype=np.uint8)
        for piece in block.pieces:
            holding = holdings[piece.run.place]
            assert (piece.rank, piece.held) in set(zip(holding.ranks, holding.boxes, strict=True))
            if hosts[piece.rank] != hosts[block.owner]:
                holders = {
                    holding.ranks[h] for cell in holding.cells if cell.box.contains(piece.part) for h in cell.holders
                }
                assert all(hosts[rank] != hosts[block.owner] for rank in holders), "bytes travel that are at home"
            source = held_array(fulls[piece.run.place.spec.key], piece.held)
            piece_in_run(buffer, piece)[...] = part_of(source, piece.part, piece.held)
        written[block.file][block.offset : block.offset + block.size] = buffer
        covered[block.file][block.offset : block.offset + block.size] += 1
        assert block.offset % block_bytes == 0 or (len(set(hosts)) > 1 and not whole)
    if whole:
        assert all(len({block.owner for block in plan.blocks if block.file == file.name}) == 1 for file in files)
    for file in files:
        assert (covered[file.name] == 1).all()
        expected = file.header + b"".join(fulls[place.spec.key].tobytes() for place in file.places)
        assert written[file.name].tobytes() == expected


@settings(max_examples=1500 if "--full" in sys.argv else 500)
@given(st.data())
def test_a_load_plan_brings_each_rank_its_boxes_and_reads_no_more(data: st.DataObject) -> None:
    shape = data.draw(shapes(12))
    full = numbered(shape)
    sharding = data.draw(shardings(shape))
    (file,) = split_group("model", [TensorSpec("w", U4, shape)], 1 << 40)
    content = np.frombuffer(file.header + full.tobytes(), dtype=np.uint8)
    size = data.draw(st.sampled_from([64, 4096]))
    blocks = [StoredBlock(at, min(size, file.size - at), "digest") for at in range(0, file.size, size)]
    ranks = data.draw(st.sets(st.integers(0, len(sharding.coordinates) - 1), min_size=1))
    wants = [Want(file.places[0], part.box, rank) for rank in sorted(ranks) for part in sharding.parts(rank)]
    verify = data.draw(st.booleans())
    with patch.object(load_plan, "GAP_BYTES", 0):
        reads = plan_load([StoredFile(file.name, tuple(blocks), file.places)], wants, verify=verify, portion_bytes=48)
    got = {(want.rank, want.box): np.zeros(want.box.sizes, dtype=np.uint32) for want in wants}
    total = 0
    for read in reads:
        assert read.reader in ranks
        for portion in read.portions:
            buffer = aligned_buffer(portion.size)
            buffer[:] = 0xEE
            for start, count in portion.ranges:
                at = portion.offset + start
                buffer[start : start + count] = content[at : at + count]
                total += count
            for piece in portion.pieces:
                part_of(got[piece.rank, piece.held], piece.part, piece.held)[...] = piece_in_run(buffer, piece)
    for (_, box), array in got.items():
        assert np.array_equal(array, held_array(full, box))
    needed = np.zeros(shape, dtype=bool)
    for want in wants:
        needed[want.box.within(Box.full(shape))] = True
    if verify:
        assert total == sum(read.size for read in reads)
    else:
        assert total == int(needed.sum()) * 4
