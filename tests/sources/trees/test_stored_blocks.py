"""Places of foreign files: dealt to entries that are apart, in blocks that cut no element."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.plan.contents import Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.sources.trees.stored_blocks import stored_files

NAMES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}


def group(spans: list[tuple[int, int, int]]) -> Group:
    places = [
        Place(TensorSpec(str(number), dtype_named(NAMES[item]), (count,)), "f", begin)
        for number, (begin, count, item) in enumerate(spans)
    ]
    return Group(
        "module", {place.spec.key: Recipe.whole(place, place.spec.shape, place.spec.dtype) for place in places}
    )


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.sampled_from([1, 2, 4, 8])), max_size=30))
def test_every_place_is_in_one_entry_and_one_block(spans):
    members = group(spans)
    files = stored_files([members], "test")
    laid = [place for file in files for place in file.places]
    wanted = {p for recipe in members.tensors.values() for p in recipe.sources() if p.spec.bytes}
    assert set(laid) == wanted and len(laid) == len(wanted)
    for file in files:
        assert all(a.end <= b.begin for a, b in zip(file.places, file.places[1:], strict=False))
        assert all(a.offset + a.size <= b.offset for a, b in zip(file.blocks, file.blocks[1:], strict=False))
        for place in file.places:
            holding = [b for b in file.blocks if b.offset <= place.begin and place.end <= b.offset + b.size]
            assert len(holding) == 1 and (place.begin - holding[0].offset) % place.spec.dtype.bytes == 0


def test_very_many_tensors_of_the_same_bytes_are_refused():
    with pytest.raises(Unsupported, match="share the bytes at 0"):
        stored_files([group([(0, 8, 8)] * 300)], "test")
