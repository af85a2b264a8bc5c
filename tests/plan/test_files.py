"""The canonical split, and that safetensors reads it."""

from __future__ import annotations

from holdfast.format.dtypes import dtype_named
from holdfast.format.safetensors import decode_header
from holdfast.plan.files import TensorSpec, split_group


def spec(key: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(key, dtype_named(dtype), shape)


def test_tensors_are_dealt_in_natural_order_and_wide_ones_come_first() -> None:
    specs = [spec("l.10", "float32", 4), spec("l.9", "float64", 2), spec("l.2", "bool", 3), spec("l.1", "bfloat16", 5)]
    one = split_group("model", specs, 1 << 30)
    assert [place.spec.key for place in one[0].places] == ["l.9", "l.10", "l.1", "l.2"]
    assert [file.name for file in one] == ["model-00001-of-00001.safetensors"]
    two = split_group("model", specs, 20)
    assert [[place.spec.key for place in file.places] for file in two] == [["l.1", "l.2"], ["l.9"], ["l.10"]]
    assert split_group("model", list(reversed(specs)), 20) == two, "the order of arrival does not matter"


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own() -> None:
    files = split_group("model", [spec("a", "uint8", 4), spec("b", "uint8", 100), spec("c", "uint8", 4)], 10)
    assert [[place.spec.key for place in file.places] for file in files] == [["a"], ["b"], ["c"]]


def test_places_agree_with_the_header_and_are_aligned() -> None:
    specs = [spec(f"t{i}", dtype, i) for i, dtype in enumerate(["bool", "float64", "bfloat16", "float32", "uint8"])]
    (file,) = split_group("g", specs, 1 << 30)
    entries = decode_header(file.header, file.size, "g")
    assert {entry.key: len(file.header) + entry.begin for entry in entries} == {
        place.spec.key: place.begin for place in file.places
    }
    assert all(place.begin % place.spec.dtype.bytes == 0 for place in file.places)
    assert len(file.header) % 8 == 0


def test_a_group_without_tensors_has_one_file() -> None:
    (file,) = split_group("g", [], 10)
    assert file.places == () and file.size == len(file.header) and decode_header(file.header, file.size, "g") == ()
