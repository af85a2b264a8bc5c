"""Scales of weights: found by key, told apart by shape, and refused where they are missing or do not fit."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.plan.files import TensorSpec
from holdfast.plan.weight_scales import cache_scales, scaled_weights, stated_block


def specs(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(key, dtype_named(dtype), shape) for key, (dtype, shape) in tensors.items()}


@pytest.mark.parametrize(
    ("weight", "scale", "scheme", "block"),
    [
        ((300, 200), (3, 2), "block", (128, 128)),
        ((5, 300, 200), (5, 3, 2), "block", (128, 128)),
        ((300, 200), (300, 1), "channel", (1, 200)),
        ((300, 200), (300,), "channel", (1, 200)),
        ((5, 300, 200), (5, 300, 1), "channel", (1, 200)),
        ((300, 200), (), "tensor", (300, 200)),
        ((300, 200), (1,), "tensor", (300, 200)),
        ((300, 200), (1, 1), "tensor", (300, 200)),
        ((2, 100, 100), (2, 1, 1), "block", (128, 128)),
        ((5, 300, 200), (1,), "tensor", (300, 200)),
        ((100, 100), (1,), "tensor", (100, 100)),
        ((100, 100), (1, 1), "block", (128, 128)),
    ],
)
def test_a_scale_is_of_the_tensor_of_channels_or_of_blocks(
    weight: tuple[int, ...], scale: tuple[int, ...], scheme: str, block: tuple[int, int]
) -> None:
    found, problems = scaled_weights(specs(w=("float8_e4m3fn", weight), w_scale_inv=("float32", scale)))
    assert not problems
    assert (found["w"].scheme, found["w"].block, found["w"].scale) == (scheme, block, "w_scale_inv")


def test_the_block_size_of_the_config_decides() -> None:
    tensors = specs(w=("float8_e4m3fn", (256, 256)), w_scale=("bfloat16", (4, 2)))
    assert isinstance(scaled_weights(tensors)[1]["w"], Mismatch)
    block = stated_block({"weight_block_size": [64, 128]})
    assert scaled_weights(tensors, block)[0]["w"].text == "times a bfloat16 scale per block of 64x128"
    assert stated_block({"weight_block_size": [0, 128]}) is None
    assert stated_block({"weight_block_size": None}) is None


def test_scales_of_activations_are_named_and_others_are_refused() -> None:
    tensors = specs(**{"a.weight": ("int8", (4, 4)), "a.weight_scale": ("float32", (4, 1))})
    tensors |= specs(**{"a.input_scale": ("float32", ())})
    assert scaled_weights(tensors)[0]["a.weight"].unused == ("a.input_scale",)
    tensors |= specs(**{"a.weight_zero_point": ("int8", (4, 1))})
    problem = scaled_weights(tensors)[1]["a.weight"]
    assert isinstance(problem, Unsupported)
    assert "cannot apply 'a.weight_zero_point'" in str(problem)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"w": ("float8_e4m3fn", (4, 4))}, "neither 'w_scale_inv' nor 'w_scale' is there"),
        ({"w": ("float8_e4m3fn", (4, 4)), "w_scale": ("float32", (2, 2))}, r"\[2, 2\], which does not fit 'w'"),
        ({"w": ("float8_e4m3fn", (4, 4, 4)), "w_scale": ("float32", (2, 4, 1))}, "does not fit 'w'"),
        ({"w": ("float8_e4m3fn", (4,)), "w_scale": ("float32", ())}, "it has 1 dims"),
        ({"w": ("float8_e4m3fn", (4, 4)), "w_scale": ("int32", ())}, "'w_scale' is int32"),
        ({"w": ("uint8", (4, 4)), "w_scale": ("float32", ())}, "packed numbers"),
        ({"a": ("bfloat16", (4, 4)), "a_scale_inv": ("float32", ())}, "no quantized weight to which it belongs"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_a_problem_with_its_key(
    tensors: dict[str, tuple[str, tuple[int, ...]]], match: str
) -> None:
    found, problems = scaled_weights(specs(**tensors))
    assert not found
    (problem,) = problems.values()
    with pytest.raises((Mismatch, Unsupported), match=match):
        raise problem


def test_scales_of_the_cache_belong_to_no_weight() -> None:
    shapes: dict[str, tuple[int, ...]] = {"attn.k_scale": (1,), "attn.v_scale": (), "x.k_scale": (8,)}
    tensors = specs(**{key: ("float32", shape) for key, shape in shapes.items()})
    assert cache_scales(tensors) == ["attn.k_scale", "attn.v_scale"]
