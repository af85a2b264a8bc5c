"""Boxes of recipes against numpy: whatever the order of dims, the windows and the way of reading."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.convert import assemble
from holdfast.convert.assemble import assemble_blocks, fill, tiles
from holdfast.convert.sinks.base import tensor_files
from holdfast.convert.source_files import SourceFiles
from holdfast.convert.spans import OutputBlock, byte_hull
from holdfast.format.dtypes import dtype_named, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.files import ArrayDestination, Place, TensorSpec, split_group
from holdfast.plan.recipe import Recipe, destinations_of
from holdfast.sources.foreign import InMemoryReader

F32, BF16 = dtype_named("float32"), dtype_named("bfloat16")


class Reader(InMemoryReader):
    """A file in memory that can be mapped or not."""

    def __init__(self, data, mappable):
        super().__init__(data)
        self.mappable = mappable


class Source:
    path = "memory"

    def __init__(self, data, mappable):
        self.data, self.mappable = data, mappable

    def open_file(self, name):
        return Reader(self.data, self.mappable)


def source_files(data, mappable):
    return SourceFiles(Source(data, mappable), threading.Lock())


@st.composite
def programs(draw):
    """A file of tensors, and a recipe over them with the array that it must give."""
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    dim = draw(st.integers(0, rank - 1))
    data, parts, position = bytearray(draw(st.integers(0, 7))), [], 0
    for number in range(draw(st.integers(1, 3))):
        own = tuple(draw(st.integers(1, 9)) if d == dim else size for d, size in enumerate(shape))
        array = np.arange(np.prod(own), dtype=np.float32).reshape(own) + 1000.37 * number
        position = len(data)
        data += array.tobytes()
        place = Place(TensorSpec(f"t{number}", F32, own), "file", position)
        parts.append((Recipe.whole(place, own, F32), array))
    recipe, array = Recipe.concat([part for part, _ in parts], dim), np.concatenate([a for _, a in parts], dim)
    for step in draw(st.lists(st.sampled_from(["permute", "narrow", "twice"]), max_size=4)):
        if step == "permute":
            order = draw(st.permutations(range(rank)))
            recipe, array = recipe.permuted(order), array.transpose(order)
        elif step == "narrow":
            at = draw(st.integers(0, rank - 1))
            begin = draw(st.integers(0, array.shape[at] - 1))
            size = draw(st.integers(1, array.shape[at] - begin))
            recipe, array = recipe.narrow(at, begin, size), array.take(range(begin, begin + size), at)
        elif array.size < 2000:
            at = draw(st.integers(0, rank - 1))
            recipe, array = Recipe.concat([recipe, recipe], at), np.concatenate([array, array], at)
    if draw(st.booleans()):
        recipe, array = recipe.cast(BF16), array.astype(numpy_dtype("bfloat16"))
    return bytes(data), recipe, array


@settings(max_examples=300)
@given(programs(), st.booleans(), st.integers(4, 600), st.integers(1, 5), st.data())
def test_any_box_of_any_recipe_is_what_numpy_says(program, mappable, window_bytes, strip, data):
    source, recipe, array = program
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    sizes = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(array.shape, offsets, strict=True))
    box = Box(offsets, sizes)
    out = np.full(sizes, 0xAB, dtype=f"u{recipe.dtype.bytes}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "WINDOW_BYTES", window_bytes)
        patch.setattr(assemble, "_STRIP", strip)
        fill(source_files(source, mappable), destinations_of(recipe, box, ArrayDestination(out)))
    assert out.tobytes() == array[box.within(Box.full(array.shape))].tobytes()


@settings(max_examples=200)
@given(programs(), st.booleans(), st.integers(1, 400), st.integers(4, 600))
def test_blocks_put_together_are_the_file(program, mappable, block_elements, window_bytes):
    source, recipe, array = program
    (plan,) = split_group("model", [TensorSpec("x", recipe.dtype, recipe.shape)], 10**9)
    (file,) = tensor_files("model", [plan], {"x": recipe})
    block_bytes = 8 * block_elements
    files = source_files(source, mappable)
    found = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "WINDOW_BYTES", window_bytes)
        for offset in range(0, plan.size, 2 * block_bytes):
            starts = [at for at in (offset, offset + block_bytes) if at < plan.size]
            blocks = [OutputBlock(file, at, min(block_bytes, plan.size - at)) for at in starts]
            gathered = [(block, np.full(block_bytes, 0xAB, np.uint8)) for block in blocks]
            assemble_blocks(files, gathered)
            found += b"".join(buffer[: block.size].tobytes() for block, buffer in gathered)
    assert found == plan.header + array.tobytes()


@settings(max_examples=200)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 300), st.data())
def test_tiles_fill_a_part_and_none_reaches_further_than_it_may(shape, limit_bytes, data):
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True))
    part, place = Box(offsets, sizes), Place(TensorSpec("x", F32, tuple(shape)), "file", 0)
    counts = np.zeros(shape, int)
    for tile in tiles(part, place, limit_bytes):
        counts[tile.within(Box.full(tuple(shape)))] += 1
        begin, end = byte_hull(place, tile)
        assert end - begin <= max(limit_bytes, 4)
    assert counts.sum() == part.volume and (counts[part.within(Box.full(tuple(shape)))] == 1).all()
