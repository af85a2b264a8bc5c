"""How states are told to lie turned: shapes first, then values, then likes, then the folder."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.sources.paddle.transposed_states import transposed_orders


def unknown(key: str) -> bool | None:
    return None


def never() -> bool:
    raise AssertionError("the folder was asked")


def test_shapes_tell_matrices_and_stacks_of_experts() -> None:
    parameters = {"up.weight": (6, 4), "experts.up": (3, 6, 4), "embed.weight": (9, 4), "norm.weight": (4,)}
    states = {"up.weight": (4, 6), "experts.up": (3, 4, 6), "embed.weight": (9, 4), "norm.weight": (4,)}
    assert transposed_orders(parameters, states, unknown, never) == {"up.weight": (1, 0), "experts.up": (0, 2, 1)}


def test_nothing_is_turned_where_nothing_is() -> None:
    shapes = {"up.weight": (6, 4), "q.weight": (4, 4), "lm_head.weight": (4, 4)}
    assert transposed_orders(shapes, shapes, unknown, never) == {}


def test_a_square_matrix_goes_with_the_rest_of_the_folder_but_not_an_embedding() -> None:
    parameters = {"up_proj.weight": (6, 4), "q_proj.weight": (4, 4), "embed_tokens.weight": (4, 4)}
    states = {**parameters, "up_proj.weight": (4, 6)}
    assert set(transposed_orders(parameters, states, unknown, never)) == {"up_proj.weight", "q_proj.weight"}


def test_a_router_that_is_not_turned_is_no_word_about_others() -> None:
    """PaddleFormers turns the names of a list: a gate may stay as it is beside matrices that are turned."""
    parameters = {"mlp.gate.weight": (8, 4), "up_proj.weight": (6, 4), "q_proj.weight": (4, 4)}
    states = {**parameters, "up_proj.weight": (4, 6)}
    assert set(transposed_orders(parameters, states, unknown, never)) == {"up_proj.weight", "q_proj.weight"}


def test_likes_in_other_layers_come_before_the_folder() -> None:
    parameters = {"l.0.gate.weight": (4, 8), "l.1.gate.weight": (4, 4), "l.0.up_proj.weight": (6, 4)}
    states = {**parameters, "l.0.up_proj.weight": (4, 6)}
    assert set(transposed_orders(parameters, states, unknown, never)) == {"l.0.up_proj.weight"}


def test_values_come_before_likes_and_must_agree_with_shapes() -> None:
    square = {f"l.{n}.q_proj.weight": (4, 4) for n in range(3)}
    assert set(transposed_orders(square, square, lambda key: True, never)) == set(square)
    with pytest.raises(Mismatch, match=r"l\.1\.q_proj.*l\.0\.q_proj"):
        transposed_orders(square, square, lambda key: "1" in key, never)
    parameters = {**square, "l.9.q_proj.weight": (6, 4)}
    with pytest.raises(Mismatch, match="contradict the shapes"):
        transposed_orders(parameters, {**square, "l.9.q_proj.weight": (4, 6)}, lambda key: False, never)


@pytest.mark.parametrize("said", [True, False])
def test_the_folder_is_asked_last(said: bool) -> None:
    shapes = {"q_proj.weight": (4, 4), "norm.weight": (4,)}
    assert transposed_orders(shapes, shapes, unknown, lambda: said) == ({"q_proj.weight": (1, 0)} if said else {})


def test_states_of_other_shapes_are_parts_of_ranks() -> None:
    for shape in ((4, 3), (24,), (3, 4)):
        with pytest.raises(Unsupported, match="shards of ranks"):
            transposed_orders({"up.weight": (6, 4)}, {"up.weight": shape}, unknown, never)
