"""State that follows its parameter: per element, as one number, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.core.errors import Mismatch
from holdfast.mapping import Compiled, Mapping
from holdfast.mapping.optimizer_state import Scalar, map_state
from holdfast.plan.recipe import Recipe
from tests.mapping.arrays import Array, made, numbered, spec_of, specs_of

Q, K = numbered((4, 3)), numbered((2, 3), begin=50)
FUSED = Mapping.parse("q^T, k^T -> w, axis=1, dtype='bfloat16'\nn -> m\n")
SOURCES = {"q": Q, "k": K, "n": numbered((5, 2), begin=90)}


def compiled() -> Compiled:
    return FUSED.compile(specs_of(SOURCES))


def array_of(found: Recipe[str] | Scalar, states: dict[str, Array]) -> Array:
    assert isinstance(found, Recipe)
    return made(found, states)[0]


def test_state_with_the_shape_of_its_parameter_takes_its_boxes_and_is_not_cast() -> None:
    states = {key: (array / 3).astype(np.float64) for key, array in SOURCES.items()}
    found = map_state(compiled(), specs_of(states))
    assert np.array_equal(array_of(found["w"], states), np.concatenate([states["q"].T, states["k"].T], 1))
    assert np.array_equal(array_of(found["m"], states), states["n"])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_follows_unchanged(shape: tuple[int, ...]) -> None:
    states = {key: numbered(shape) for key in SOURCES}
    assert map_state(compiled(), specs_of(states)) == {"w": Scalar(("q", "k")), "m": Scalar(("n",))}


def test_a_parameter_of_one_element_has_state_per_element() -> None:
    sources = {"a": numbered((1,)), "b": numbered((1,), begin=5)}
    found = map_state(Mapping.parse("a, b -> c, axis=0").compile(specs_of(sources)), specs_of(sources))
    assert array_of(found["c"], sources).tolist() == [0, 5]


def test_targets_whose_sources_have_no_such_state_are_left_out() -> None:
    assert set(map_state(compiled(), {"n": spec_of(SOURCES["n"])})) == {"m"}
    assert map_state(compiled(), {}) == {}


def test_factored_state_follows_a_parameter_that_is_renamed() -> None:
    row = {"n": numbered((5,))}
    assert array_of(map_state(compiled(), specs_of(row))["m"], row).tolist() == [0, 1, 2, 3, 4]


def test_factored_state_of_a_fused_weight_is_refused() -> None:
    states = {"q": numbered((4,)), "k": numbered((2,))}
    with pytest.raises(Mismatch, match=r"'w' cannot be built: 'q' \[4, 3\] has \[4\].*can only follow a renamed param"):
        map_state(compiled(), specs_of(states))
    turned = Mapping.parse("a^T -> b").compile(specs_of({"a": Q}))
    with pytest.raises(Mismatch, match="factored"):
        map_state(turned, specs_of({"a": numbered((4,))}))


def test_state_of_some_sources_only_is_refused() -> None:
    with pytest.raises(Mismatch, match="'q' has it, but not 'k'"):
        map_state(compiled(), {"q": spec_of(Q)})


def test_state_of_several_dtypes_is_refused() -> None:
    with pytest.raises(Mismatch, match="would mix dtypes: float32, float64"):
        map_state(compiled(), specs_of({"q": Q, "k": K.astype(np.float64)}))


def test_a_number_and_an_array_do_not_become_one_state() -> None:
    with pytest.raises(Mismatch, match="cannot be built"):
        map_state(compiled(), specs_of({"q": Q, "k": numbered(())}))
