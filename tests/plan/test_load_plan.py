"""Load plans: ranges that touch become one, strided boxes are read by rows, readers are balanced."""

from __future__ import annotations

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.files import TensorSpec, split_group
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


def test_a_column_alone_is_read_by_rows() -> None:
    (read,) = reads_of([("a", Box((0, 4), (8, 4)), 0)], verify=False)
    (portion,) = read.portions
    assert [size for _, size in portion.ranges] == [16] * 8


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
