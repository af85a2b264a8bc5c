"""Pieces as rows of bytes, compared with numpy's own slices."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.byte_rows import ByteRows, rows_of
from holdfast.plan.files import Place, ShardPiece, TensorRun, TensorSpec


def random_piece(draw: random.Random) -> ShardPiece:
    dims = draw.randint(0, 4)
    shape = tuple(draw.randint(1, 5) for _ in range(dims))

    def inside(box: Box) -> Box:
        begins = [draw.randint(0, size - 1) for size in box.sizes]
        sizes = [draw.randint(1, size - begin) for size, begin in zip(box.sizes, begins, strict=True)]
        return Box(tuple(o + b for o, b in zip(box.offsets, begins, strict=True)), tuple(sizes))

    spec = TensorSpec("w", dtype_named(draw.choice(["float32", "bfloat16", "uint8", "float64"])), shape)
    part = inside(Box.full(shape))

    def around() -> Box:
        begins = [draw.randint(0, offset) for offset in part.offsets]
        stops = [draw.randint(stop, size) for stop, size in zip(part.stops, shape, strict=True)]
        return Box(tuple(begins), tuple(stop - begin for begin, stop in zip(begins, stops, strict=True)))

    run = TensorRun(Place(spec, "file", 0), around(), draw.randint(0, 9))
    return ShardPiece(run, part, 0, around())


def copied(piece: ShardPiece, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the shard as the rows fill it from a block, span by span, and as numpy does."""
    item = piece.run.place.spec.dtype.bytes
    block = np.random.default_rng(0).integers(1, 255, piece.run.at + piece.run.bytes + 3).astype(np.uint8)
    held = np.zeros(piece.held.volume * item, np.uint8)
    for rows in rows_of(piece):
        for begin, end in spans:
            for part in rows.within(begin, end):
                assert begin <= part.at and part.end <= end
                for row in range(part.count):
                    at, to = part.at + row * part.pitch, part.shard_at + row * part.shard_pitch
                    assert not held[to : to + part.width].any()  # no byte twice
                    held[to : to + part.width] = block[at : at + part.width]
    truth = np.zeros((*piece.held.sizes, item), np.uint8)
    run = block[piece.run.at : piece.run.at + piece.run.bytes].reshape(*piece.run.box.sizes, item)
    truth[piece.part.within(piece.held)] = run[piece.part.within(piece.run.box)]
    return held, truth.reshape(-1)


@pytest.mark.parametrize("seed", range(300))
def test_rows_are_the_bytes_of_the_piece_in_whatever_steps_they_are_read(seed):
    draw = random.Random(seed)
    piece = random_piece(draw)
    end = piece.run.at + piece.run.bytes + 3
    step = draw.randint(1, end)
    for spans in ([(0, end)], [(at, min(at + step, end)) for at in range(0, end, step)]):
        held, truth = copied(piece, spans)
        assert (held == truth).all()


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 8, 100])
def test_batches_are_all_rows_within_the_limit(limit):
    rows = ByteRows(at=5, pitch=9, shard_at=2, shard_pitch=4, width=4, count=6)
    found = []
    for batch in rows.batches(limit):
        assert batch.bytes <= limit
        for row in range(batch.count):
            at, to = batch.at + row * batch.pitch, batch.shard_at + row * batch.shard_pitch
            found += [(at + byte, to + byte) for byte in range(batch.width)]
    assert found == [(5 + 9 * row + byte, 2 + 4 * row + byte) for row in range(6) for byte in range(4)]


def test_whole_columns_are_one_set_of_rows():
    spec = TensorSpec("w", dtype_named("float32"), (8, 6))
    run = TensorRun(Place(spec, "file", 0), Box((2, 0), (5, 6)), 16)
    held = Box((0, 3), (8, 3))
    piece = ShardPiece(run, Box((2, 3), (5, 3)), 0, held)
    assert list(rows_of(piece)) == [ByteRows(at=28, pitch=24, shard_at=24, shard_pitch=12, width=12, count=5)]
