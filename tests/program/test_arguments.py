"""Values of arguments as strict JSON."""

from __future__ import annotations

import math

import pytest

from holdfast.program.arguments import (
    DeviceValue,
    DtypeValue,
    FormatValue,
    LayoutValue,
    Ref,
    SliceValue,
    decode_value,
    encode_value,
    references,
)

VALUES = [
    None,
    True,
    -7,
    2**63 - 1,
    1.5,
    float("inf"),
    -float("inf"),
    "tanh",
    complex(1, float("-inf")),
    Ref("x"),
    DtypeValue("float8_e4m3fn"),
    DeviceValue("model"),
    LayoutValue("strided"),
    FormatValue("channels_last"),
    SliceValue(None, Ref("n"), 2),
    (Ref("a"), (1, Ref("b")), None),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back(value):
    back = decode_value(encode_value(value), ValueError)
    assert back == value and type(back) is type(value)


def test_nan_comes_back():
    back = decode_value({"$float": "nan"}, ValueError)
    assert isinstance(back, float) and math.isnan(back)
    assert encode_value(back) == {"$float": "nan"}


@pytest.mark.parametrize(
    "data",
    [
        {"$dtype": "object"},
        {"$device": "cuda:0"},
        {"$layout": "sparse_coo"},
        {"$format": "__class__"},
        {"$float": "1e400"},
        {"$eval": "1"},
        {"$": 3},
        {"$": "a", "$dtype": "int8"},
        {},
        {"$complex": [1]},
        {"$complex": [1, "2"]},
        {"$slice": ["a", 1, 2]},
        2**63,
        "a" * 5000,
        [[[[[[[[[[1]]]]]]]]]],
        [0] * 100_001,
    ],
    ids=lambda data: str(data)[:30],
)
def test_other_data_is_refused(data):
    with pytest.raises(ValueError):
        decode_value(data, ValueError)


def test_references_are_found_in_lists_and_slices():
    assert list(references((Ref("a"), (1, Ref("b")), SliceValue(None, Ref("c"), None)))) == ["a", "b", "c"]
