"""Load plans: ranges that touch become one, strided boxes are read by rows, readers are balanced."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan import load_plan
from holdfast.plan.files import Place, TensorSpec, split_group
from holdfast.plan.load_plan import Read, StoredBlock, StoredFile, Want, plan_load

F4 = dtype_named("float32")


def reads_of(wants: list[tuple[str, Box, int]], *, verify: bool, portion_bytes: int = 1 << 20) -> tuple[Read, ...]:
    (file,) = split_group("model", [TensorSpec(key, F4, (8, 16)) for key in ("a", "b", "c")], 1 << 40)
    size = 1024
    blocks = tuple(StoredBlock(at, min(size, file.size - at), "d") for at in range(0, file.size, size))
    places = {place.spec.key: place for place in file.places}
    stored = StoredFile(file.name, blocks, file.places)
    found = [Want(places[key], box, rank) for key, box, rank in wants]
    return plan_load([stored], found, verify=verify, portion_bytes=portion_bytes)


FULL = Box.full((8, 16))


def test_neighbouring_tensors_are_read_in_one_range() -> None:
    reads = reads_of([("a", FULL, 0), ("b", FULL, 0), ("c", FULL, 0)], verify=False)
    assert all(len(portion.ranges) == 1 for read in reads for portion in read.portions)
    assert sum(read.bytes for read in reads) == 3 * 512


def test_a_column_alone_is_read_by_rows(monkeypatch) -> None:
    monkeypatch.setattr(load_plan, "GAP_BYTES", 47)  # 48 bytes are between the rows
    (read,) = reads_of([("a", Box((0, 4), (8, 4)), 0)], verify=False)
    (portion,) = read.portions
    assert [size for _, size in portion.ranges] == [16] * 8


def test_rows_with_small_gaps_are_read_in_one_range() -> None:
    (read,) = reads_of([("a", Box((0, 4), (8, 4)), 0)], verify=False)
    (portion,) = read.portions
    assert [size for _, size in portion.ranges] == [7 * 64 + 16]


def test_columns_that_fill_the_rows_are_read_whole_and_shared() -> None:
    wants = [("a", Box((0, 4 * rank), (8, 4)), rank) for rank in range(4)]
    (read,) = reads_of(wants, verify=False)
    (portion,) = read.portions
    assert [size for _, size in portion.ranges] == [512]
    assert portion.receivers() == {0, 1, 2, 3}


def test_verified_blocks_are_read_whole_and_once() -> None:
    reads = reads_of([("b", Box((0, 0), (1, 4)), 0), ("b", Box((1, 0), (1, 4)), 1)], verify=True)
    assert len(reads) == 1 and reads[0].bytes == reads[0].size and reads[0].digest == "d"


def test_readers_are_balanced() -> None:
    wants = [(key, FULL, rank) for key in ("a", "b", "c") for rank in range(2)]
    reads = reads_of(wants, verify=False, portion_bytes=128)
    load = {rank: sum(read.bytes for read in reads if read.reader == rank) for rank in range(2)}
    assert abs(load[0] - load[1]) <= 256


def test_verified_blocks_are_balanced_too() -> None:
    reads = reads_of([(key, FULL, rank) for key in ("a", "b", "c") for rank in range(2)], verify=True)
    assert sorted(read.reader for read in reads) == [0, 1]


def line(*sizes: int) -> tuple[Place, ...]:
    """Tensors of bytes that follow each other in a file without a header."""
    begins = np.cumsum([0, *sizes]).tolist()
    return tuple(
        Place(TensorSpec(f"t{at}", dtype_named("uint8"), (size,)), "f", begins[at]) for at, size in enumerate(sizes)
    )


def stored(places: tuple[Place, ...], block_bytes: int, digest: str | None = "d") -> StoredFile:
    size = places[-1].end
    blocks = (StoredBlock(at, min(block_bytes, size - at), digest) for at in range(0, size, block_bytes))
    return StoredFile("f", tuple(blocks), places)


@pytest.mark.parametrize("verify", [False, True])
def test_a_reader_is_chosen_by_all_that_it_has_read(verify: bool) -> None:
    """Rank 0 has read 64 bytes; reading the second tensor saves it 64 more than rank 1: a tie, which it wins."""
    places = line(64, 128)
    wants = [
        Want(places[0], Box((0,), (64,)), 0),
        Want(places[1], Box((0,), (128,)), 0),
        Want(places[1], Box((0,), (64,)), 1),
    ]
    file = StoredFile("f", (StoredBlock(0, 64, "d"), StoredBlock(64, 128, "d")), places)
    reads = plan_load([file], wants, verify=verify, portion_bytes=128)
    assert [read.reader for read in reads] == [0, 0]
    less = [wants[0], Want(places[1], Box((0,), (127,)), 0), wants[2]]
    assert [read.reader for read in plan_load([file], less, verify=verify, portion_bytes=128)] == [0, 1]


@settings(max_examples=60)
@given(st.data())
def test_exactly_the_wanted_bytes_are_read_and_all_pieces_are_delivered(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    spec = TensorSpec("t", dtype_named("uint16"), shape)
    places = (Place(TensorSpec("before", dtype_named("uint16"), (3,)), "f", 4), Place(spec, "f", 10))
    wants = []
    for rank in range(data.draw(st.integers(1, 3))):
        begins = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(1, size - begin)) for size, begin in zip(shape, begins, strict=True))
        wants.append(Want(places[1], Box(begins, sizes), rank))
    elements = np.zeros(shape, bool)
    for want in wants:
        elements[want.box.within(Box.full(shape))] = True
    needed = np.concatenate([np.zeros(5, bool), elements.reshape(-1)]).repeat(2)
    portion_bytes = 2 * data.draw(st.integers(1, 70))
    with patch.object(load_plan, "GAP_BYTES", 0):
        reads = plan_load([stored(places, 16)], wants, verify=False, portion_bytes=portion_bytes)
    read_times = np.zeros(len(needed), int)
    for portion in (portion for read in reads for portion in read.portions):
        assert portion.pieces and portion.size <= portion_bytes
        for begin, size in portion.ranges:
            assert begin >= 0 and size > 0 and begin + size <= portion.size
            read_times[portion.offset + begin : portion.offset + begin + size] += 1
    assert np.array_equal(read_times, needed)
    for want in wants:
        parts = [
            piece.part.volume for read in reads for p in read.portions for piece in p.pieces if piece.rank == want.rank
        ]
        assert sum(parts) == want.box.volume


def test_a_read_that_is_not_verified_is_no_larger_than_the_wanted_tensors() -> None:
    places = line(10, 20, 30)
    (read,) = plan_load([stored(places, 60)], [Want(places[1], Box((0,), (20,)), 0)], verify=False, portion_bytes=100)
    assert (read.offset, read.size, read.digest) == (10, 20, None)


def test_a_verified_block_is_read_from_its_begin_to_its_end_in_portions() -> None:
    places = line(10, 20, 30)
    (read,) = plan_load([stored(places, 60)], [Want(places[1], Box((0,), (20,)), 0)], verify=True, portion_bytes=25)
    assert [(p.offset, p.size, p.ranges) for p in read.portions] == [
        (0, 25, ((0, 25),)),
        (25, 25, ((0, 25),)),
        (50, 10, ((0, 10),)),
    ]


def test_a_block_without_a_digest_is_read_as_needed_though_others_are_verified() -> None:
    places = line(10, 20, 30)
    file = stored(places, 60, digest=None)
    (read,) = plan_load([file], [Want(places[1], Box((0,), (20,)), 0)], verify=True, portion_bytes=100)
    assert (read.digest, read.bytes) == (None, 20)


def test_nothing_is_read_where_nothing_is_wanted() -> None:
    places = line(10, 20, 30)
    empty = Want(places[1], Box((0,), (0,)), 0)
    for verify in (False, True):
        assert plan_load([stored(places, 16)], [empty], verify=verify, portion_bytes=100) == ()
        first = Want(places[0], Box((0,), (10,)), 0)
        assert len(plan_load([stored(places, 16)], [first], verify=verify, portion_bytes=100)) == 1
