"""Gathering: blocks and travel files from fragments, contiguous, interleaved or strided."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.gather import Fragment, Gatherer, write_travel_file
from holdfast.core.errors import HoldfastError
from holdfast.plan.files import row_major_strides
from holdfast.storage.local import LocalStorage


@dataclass(frozen=True)
class Block:
    size: int
    header: bytes = b""
    file: str = "f"
    offset: int = 64


def fragment(at: int, array: Any, whole: tuple[int, ...] | None = None) -> Fragment:
    """A part of a tensor of the shape `whole`, or all of it."""
    strides = row_major_strides(whole or array.shape, array.itemsize)
    return Fragment(at, array.itemsize, array.shape, strides, lambda: array)


def test_contiguous_memory_is_not_copied() -> None:
    first, second = np.arange(4, dtype=np.uint8), np.arange(6, dtype=np.uint16)
    parts = list(Gatherer().block(Block(18, b"hd"), [fragment(6, second), fragment(2, first)]))
    assert b"".join(parts) == b"hd" + first.tobytes() + second.tobytes()
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), first)
    assert np.shares_memory(np.frombuffer(parts[2], np.uint16), second)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_of_a_tensor_make_its_bytes(seed: int) -> None:
    """The tensor is split along two dims at random; the parts are copies, or strided views of it."""
    random = np.random.default_rng(seed)
    tensor = random.integers(0, 1 << 16, random.integers(2, 9, 3), dtype=np.uint16)
    rows, columns = ([0, int(random.integers(1, size)), size] for size in tensor.shape[:2])
    fragments = []
    for top, bottom in itertools.pairwise(rows):
        for left, right in itertools.pairwise(columns):
            part = tensor[top:bottom, left:right]
            at = 8 + (top * tensor.shape[1] + left) * tensor.shape[2] * 2
            fragments.append(fragment(at, part.copy() if random.random() < 0.5 else part, tensor.shape))
    random.shuffle(fragments)
    gathered = b"".join(Gatherer().block(Block(8 + tensor.nbytes, b"12345678"), fragments))
    assert gathered == b"12345678" + tensor.tobytes()


def test_a_larger_block_gets_a_larger_buffer() -> None:
    memory = np.arange(64, dtype=np.uint8).reshape(8, 8)
    gatherer = Gatherer()
    for count in (2, 4, 2):
        part = memory[:2, :count]
        assert b"".join(gatherer.block(Block(part.size), [fragment(0, part)])) == part.tobytes()


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_hole_is_an_error(at: int) -> None:
    fragments = [fragment(0, np.zeros(4, np.uint8)), fragment(4, np.zeros(4, np.uint8))]
    hole = [piece for piece in fragments if not piece.at <= at < piece.end]
    with pytest.raises(HoldfastError, match=r"f at 64: (no rank provides these bytes|gathered 4 of 8 bytes)"):
        list(Gatherer().block(Block(8), hole))


def test_a_hole_between_columns_is_an_error() -> None:
    tensor = np.zeros((3, 4), np.uint8)
    with pytest.raises(HoldfastError, match="no rank provides"):
        list(Gatherer().block(Block(12), [fragment(0, tensor[:, :1], (3, 4)), fragment(2, tensor[:, 2:], (3, 4))]))


def test_a_travel_file_has_its_fragments_and_zeros_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.gather._TRAVEL_BYTES", 100)
    parts = [np.full((3, size), size, np.uint8) for size in (1, 5, 70, 33, 2)]
    storage = LocalStorage(tmp_path)
    storage.begin(".attempt-0123456789abcdef")
    fragments: list[Fragment] = []
    expected = bytearray()
    for part in parts:
        expected.extend(bytes(-len(expected) % 64))
        fragments.append(fragment(len(expected), part))
        expected += part.tobytes()
    write_travel_file(storage, ".attempt-0123456789abcdef", "travel-0-1", len(expected), fragments)
    assert (tmp_path / ".attempt-0123456789abcdef" / "travel-0-1").read_bytes() == bytes(expected)
