"""Explanations: for every target where it comes from."""

from __future__ import annotations

import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Mapping
from holdfast.plan.files import TensorSpec

PROGRAM = Mapping.parse("q^T, k^T -> qk, axis=1, dtype='float32'\nn -> m\nr -> _\n_ -> z\n")


def test_boxes_permutations_casts_and_what_is_left_over() -> None:
    keys = {
        "q": ((4, 3), "bfloat16"),
        "k": ((2, 3), dtype_named("bfloat16")),
        "n": ((), "float32"),
        "r": ((1,), "int8"),
    }
    keys["x"] = ((5,), "int8")
    assert PROGRAM.explain(keys, ["qk", "m", "z", "y"]).splitlines() == [
        "qk: [3, 6] float32",
        "  [0:3, 0:4] <- q [0:4, 0:3], dims [1, 0], cast to float32",
        "  [0:3, 4:6] <- k [0:2, 0:3], dims [1, 0], cast to float32",
        "m: [] float32 <- n",
        "z: keeps its initial value",
        "y: missing, nothing makes it",
        "removed: r",
        "unused: x",
    ]


def test_shapes_without_dtypes() -> None:
    text = Mapping.parse("a -> b, src_dtype='bfloat16', dst_dtype='float32'\nc^T -> d").explain({"a": [2], "c": (2, 3)})
    assert text.splitlines() == ["b: [2] float32 <- a, cast to float32", "d: [3, 2] <- c, dims [1, 0]"]


def test_specs_of_tensors() -> None:
    spec = TensorSpec("a", dtype_named("int8"), (2,))
    assert Mapping.parse("a -> b").explain([spec]) == "b: [2] int8 <- a\n"
    assert Mapping.parse("a -> b").explain({"a": spec}, {"b": [2]}) == "b: [2] int8 <- a\n"


def test_names_alone() -> None:
    text = "m.$L.g, m.$L.u -> t.$L, axis=0\nt.* -> f, axis=0\nr -> _\n_ -> z\n"
    told = Mapping.parse(text).explain(["m.0.g", "m.0.u", "m.1.g", "m.1.u", "r", "x"])
    assert told.splitlines() == [
        "x <- x",
        "f <- m.0.g, m.0.u, m.1.g, m.1.u (line 2, column 1)",
        "z: keeps its initial value",
        "removed: r",
    ]
    told = Mapping.parse("a -> b").explain(["a", "c"], ["b", "d"])
    assert told.splitlines() == ["b <- a (line 1, column 1)", "d: missing, nothing makes it", "unused: c"]


def test_fused_weights_are_explained_for_a_degree() -> None:
    told = Mapping.parse("g, u -> w, fused_ffn").explain({"g": (1, 2), "u": (1, 2)}, target_tp=2)
    assert [line.split(" <- ")[1] for line in told.splitlines()[1:]] == [
        "g [0:1, 0:1]", "u [0:1, 0:1]", "g [0:1, 1:2]", "u [0:1, 1:2]",
    ]  # fmt: skip


def test_what_is_no_shape_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'a': 'x' is neither a shape"):
        PROGRAM.explain({"a": "x"})
