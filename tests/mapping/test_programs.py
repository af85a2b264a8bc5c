"""Thousands of programs against numpy: forward on full tensors and on shards of uneven ranks, and back again."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.layout.box import Box
from holdfast.mapping import Compiled, Mapping
from holdfast.plan.recipe import is_filled
from tests.mapping.arrays import Array, made, outputs, same, specs_of
from tests.mapping.programs import FORMS, Drawn, programs

PROGRAMS = 5_000 if "--full" in sys.argv else 600
FORM_NAMES = {
    "identity", "rename", "tied", "transpose", "permute", "cast", "concat", "split", "star", "array", "ids", "offset",
    "fused_ffn", "fused_qkv", "fused_qkv_old", "stack", "unstack", "remove", "add",
}  # fmt: skip


def check_shards(compiled: Compiled, sources: dict[str, Array], targets: dict[str, Array], cut: int) -> None:
    """Four ranks hold uneven shards: each reads what its boxes need and no more."""
    for key, recipe in compiled.recipes.items():
        shape = recipe.shape
        if not shape:
            continue
        dim = cut % len(shape)
        borders = sorted({0, shape[dim], *(cut * prime % (shape[dim] + 1) for prime in (3, 7, 11))})
        for begin, end in itertools.pairwise(borders):
            offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
            sizes = tuple(end - begin if d == dim else size for d, size in enumerate(shape))
            box = Box(offsets, sizes)
            found, read = made(recipe, sources, box)
            wanted = targets[key][box.within(Box.full(shape))]
            assert found.tobytes() == wanted.tobytes()
            assert read == box.volume


def check_reverse(program: Drawn, mapping: Mapping) -> None:
    """The reverse makes the sources again, bit for bit; removed ones keep their initial value."""
    back = mapping.reverse()
    assert Mapping.parse(str(back)) == back
    stored = {**program.targets, **{key: np.zeros(1, np.float32) for key in program.kept}}
    compiled = back.compile(specs_of(stored), specs_of(program.sources))
    wanted = {key: array for key, array in program.sources.items() if key not in program.removed}
    assert same(outputs(compiled, stored), wanted)
    assert compiled.kept == program.removed
    assert compiled.missing == ()
    pinned = mapping.reverse({key: array.shape for key, array in program.sources.items()})
    assert Mapping.parse(str(pinned)) == pinned
    alone = pinned.compile(specs_of(stored))  # no targets are known: sizes and names come from the pinned program
    assert same(outputs(alone, stored), wanted)


@pytest.mark.slow
def test_programs_do_what_numpy_does_forward_on_shards_and_back() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=PROGRAMS, database=None)
    @given(programs(), st.integers(0, 1000))
    def check(program: Drawn, cut: int) -> None:
        seen["programs"] += 1
        seen.update(program.forms)
        mapping = Mapping.parse("\n".join(program.statements) + "\n")
        assert Mapping.parse(str(mapping)) == mapping
        targets = {**specs_of(program.targets), **dict.fromkeys(program.kept)}
        compiled = mapping.compile(specs_of(program.sources), targets)
        assert all(is_filled(recipe) for recipe in compiled.recipes.values())
        assert same(outputs(compiled, program.sources), program.targets)
        assert compiled.kept == program.kept
        assert compiled.removed == program.removed
        assert (compiled.unused, compiled.missing) == ((), ())
        offline = mapping.compile(specs_of(program.sources))
        assert offline.recipes == compiled.recipes
        check_shards(compiled, program.sources, program.targets, cut)
        check_reverse(program, mapping)

    check()
    assert seen["programs"] >= PROGRAMS
    assert seen.keys() == {"programs", *FORM_NAMES}
    assert min(seen.values()) >= PROGRAMS // (4 * len(FORMS))


def test_the_reverse_joins_what_was_cast_beside_what_was_not() -> None:
    statements = [
        "a -> b, src_dtype='float32', dst_dtype='float64'",
        "b -> c, src_dtype='float64', dst_dtype='float32'",
        "c, d -> e, axis=0",
    ]
    mapping = Mapping.parse("\n".join(statements) + "\n")
    sources = {"a": np.zeros(1, np.float32), "d": np.ones(2, np.float32)}
    pinned = mapping.reverse({key: array.shape for key, array in sources.items()})
    stored = {"e": np.concatenate([sources["a"], sources["d"]])}
    assert same(outputs(pinned.compile(specs_of(stored)), stored), sources)
