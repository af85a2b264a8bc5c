"""Quantized weights: each library's names are recognized, and only a weight with its scales counts."""

from __future__ import annotations

import pytest

from holdfast.plan.quantized_keys import Quantized, is_float8, quantized_weights, relation

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("weight", "dtype", "companion"),
    [
        ("a.b.weight", FP8, "a.b.weight_scale_inv"),
        ("a.b.weight", FP8, "a.b.input_scale"),
        ("a.b.weight", "int8", "a.b.SCB"),
        ("a.b.qweight", "int32", "a.b.qzeros"),
        ("a.b.weight_packed", "int32", "a.b.weight_shape"),
        ("a.b.W_q", "uint8", "a.b.meta"),
        ("a.b.weight", "uint8", "a.b.weight.quant_state.bitsandbytes__nf4"),
        ("a.b.weight", "uint8", "a.b.weight.absmax"),
        ("a.experts_blocks", "uint8", "a.experts_scales"),
        ("qweight", "int32", "qzeros"),
        ("weight", FP8, "weight_scale"),
        ("_blocks", "uint8", "_scales"),
    ],
)
def test_a_weight_is_found_with_its_companion(weight: str, dtype: str, companion: str) -> None:
    found = quantized_weights({weight: dtype, companion: "float32", "a.norm": "float32"})
    assert found == {weight: Quantized(weight, (companion,), dtype)}


def test_companions_are_sorted_and_complete() -> None:
    keys = ["l.scales", "l.qzeros", "l.g_idx"]
    found = quantized_weights({**dict.fromkeys(keys, "float16"), "l.qweight": "int32"})
    assert found["l.qweight"].companions == ("l.g_idx", "l.qzeros", "l.scales")


def test_each_layer_has_its_own_companions() -> None:
    found = quantized_weights({f"{layer}.{name}": "int32" for layer in "ab" for name in ("qweight", "qzeros")})
    assert {weight: each.companions for weight, each in found.items()} == {
        "a.qweight": ("a.qzeros",),
        "b.qweight": ("b.qzeros",),
    }


def test_a_weight_of_ordinary_numbers_is_not_quantized() -> None:
    assert quantized_weights({"l.weight": "bfloat16", "l.weight_scale": "float32"}) == {}


def test_a_weight_without_scales_is_not_quantized() -> None:
    assert quantized_weights({"l.weight": FP8, "l.bias": "float32"}) == {}


def test_scales_without_a_weight_are_ordinary_tensors() -> None:
    assert quantized_weights({"l.scales": "float16", "l.qzeros": "int32", "l.weight_scale": "float32"}) == {}


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [(FP8, False), ("float8_e5m2", False), ("int8", False), ("uint8", True), ("int32", True)],
)
def test_only_elements_of_several_numbers_are_packed(dtype: str, packed: bool) -> None:
    assert Quantized("w", (), dtype).is_packed is packed


def test_block_scales_are_the_scales_under_the_key_of_the_weight() -> None:
    companions = ("l.input_scale", "l.weight_scale", "l.weight_scale_inv", "l.weight_scales", "l.weight_shape")
    assert Quantized("l.weight", companions, FP8).block_scales() == [
        "l.weight_scale",
        "l.weight_scale_inv",
        "l.weight_scales",
    ]


def test_a_packed_weight_has_no_block_scales() -> None:
    assert Quantized("l.weight", ("l.weight_scale",), "uint8").block_scales() == []


def test_a_message_names_the_weight_and_three_companions() -> None:
    what = Quantized("w", ("w1", "w2", "w3", "w4"), FP8).what
    assert what == "'w' is float8_e4m3fn, quantized, stored with 'w1', 'w2', 'w3'"


@pytest.mark.parametrize(("dtype", "found"), [(FP8, True), ("float8_e5m2", True), ("float16", False), ("int8", False)])
def test_float8_is_known_by_its_name(dtype: str, found: bool) -> None:
    assert is_float8(dtype) is found


@pytest.mark.parametrize(
    ("weight", "key", "endings"),
    [
        ("a.experts_blocks", "a.experts_scales", ("_blocks", "_scales")),
        ("a.experts_blocks", "a.experts_blocks_shape", ("", "_shape")),
        ("a.weight", "a.weight_scales", ("", "_scales")),
        ("a.weight", "a.weight.absmax", ("", ".absmax")),
        ("a.b.qweight", "a.b.qzeros", ("qweight", "qzeros")),
        ("qweight", "qzeros", ("qweight", "qzeros")),
    ],
)
def test_a_relation_turns_the_key_of_the_weight_into_that_of_the_companion(
    weight: str, key: str, endings: tuple[str, str]
) -> None:
    assert relation(weight, key) == endings
    assert weight.removesuffix(endings[0]) + endings[1] == key


def test_keys_of_different_layers_have_no_relation() -> None:
    assert relation("a.qweight", "b.qzeros") is None
