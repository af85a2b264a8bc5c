"""Fused q, k and v whose heads have different sizes: q with a gate (Qwen3-Next) has heads of twice the size."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.mapping import Mapping
from tests.mapping.arrays import Array, numbered, run, same, specs_of

HEADS, GROUPS = 4, 2
Q, K, V = numbered((16, 3)), numbered((4, 3), begin=100), numbered((4, 3), begin=200)
PARTS = {"q": Q, "k": K, "v": V}
FUSE = f"q, k, v -> w, fused_qkv, num_heads={HEADS}, num_key_value_groups={GROUPS}, axis=0"
CUT = f"w -> q, k, v, fused_qkv, num_heads={HEADS}, num_key_value_groups={GROUPS}, axis=0"


def grouped() -> Array:
    return np.concatenate(
        [part for g in (0, 1) for part in (Q[8 * g : 8 * g + 8], K[2 * g : 2 * g + 2], V[2 * g :][:2])]
    )


def test_a_config_fuses_heads_of_different_sizes_as_paddle_does() -> None:
    assert same(run({"aoa_statements": [FUSE]}, PARTS), {"w": grouped()})


def test_elsewhere_sizes_says_that_they_may_differ() -> None:
    with pytest.raises(Mismatch, match=r"heads of different sizes: q has 16 elements for 4 heads.*add sizes=any"):
        run(FUSE, PARTS)
    assert same(run(f"{FUSE}, sizes=any", PARTS), {"w": grouped()})
    assert same(run(f"{FUSE}, sizes=[16, 4, 4]", PARTS), {"w": grouped()})


def test_a_cut_goes_by_given_sizes_or_by_those_of_the_targets() -> None:
    fused = {"w": grouped()}
    assert same(run(f"{CUT}, sizes=[16, 4, 4]", fused), PARTS)
    assert same(run(CUT, fused, specs_of(PARTS)), PARTS)
    assert same(run({"aoa_statements": [CUT]}, fused, specs_of(PARTS)), PARTS)
    with pytest.raises(Mismatch, match="q, k and v of 16, 4 and 2 add up to 22, not 24"):
        run(f"{CUT}, sizes=[16, 4, 2]", fused)
    with pytest.raises(Mismatch, match=r"the sizes of 'q', 'k', 'v' are not known; add sizes=\[q, k, v\]"):
        run(f"{CUT}, sizes=targets", fused)


def test_the_reverse_knows_that_sizes_may_differ() -> None:
    mapping = Mapping.parse(f"{FUSE}, sizes=any")
    assert str(mapping.reverse()).strip().endswith("sizes=targets, num_heads=4, num_key_value_groups=2")
    assert same(run(mapping.reverse(), {"w": grouped()}, specs_of(PARTS)), PARTS)
    pinned = mapping.reverse({key: value.shape for key, value in PARTS.items()})
    assert same(run(pinned, {"w": grouped()}), PARTS)
    assert same(run(pinned.reverse(), PARTS), {"w": grouped()})
    config = {"aoa_statements": [FUSE], "aoa_config_reverse": True}
    assert same(run(config, {"w": grouped()}, specs_of(PARTS)), PARTS)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_heads_by_tensor_parallel_rank(degree: int) -> None:
    text = f"q, k, v -> w, fused_qkv_old, num_heads=4, num_key_value_groups=2, axis=0, tp_degree={degree}, sizes=any"
    fused = run(text, PARTS)
    back = text.replace("q, k, v -> w", "w -> q, k, v").replace("sizes=any", "sizes=[16, 4, 4]")
    assert same(run(back, fused), PARTS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{FUSE}, sizes=[1, 2]", "three parts, q, k and v"),
        (f"{CUT}, sizes=any", "the one that splits uses sizes=targets"),
        (f"{FUSE}, sizes=targets", "the one that fuses uses sizes=any"),
        ("a, b -> c, axis=0, sizes=any", "needs fused_qkv"),
        ("w -> w2, fused_qkv_old, num_heads=4, num_key_value_groups=2, sizes=[4, 2, 2]", "heads have one size"),
    ],
)
def test_sizes_where_they_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Mapping.parse(text)
