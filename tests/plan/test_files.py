"""The canonical split, and that safetensors reads it."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.core import limits
from holdfast.format.dtypes import dtype_named
from holdfast.format.safetensors import decode_header
from holdfast.layout.box import Box
from holdfast.plan.files import (
    ArrayDestination,
    FileMembers,
    Place,
    ShardPiece,
    TensorRun,
    TensorSpec,
    aligned_buffer,
    assign_to_files,
    bytes_of,
    piece_in_run,
    runs_in,
    split_group,
)


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


def test_a_file_may_be_exactly_as_large_as_the_limit() -> None:
    files = split_group("model", [spec(key, "uint8", 5) for key in "abcde"], 10)
    assert [[place.spec.key for place in file.places] for file in files] == [["a", "b"], ["c", "d"], ["e"]]
    assert [file.number for file in files] == [0, 1, 2]


def header_limits(*members: TensorSpec) -> int:
    return FileMembers("f", 0, members).header_limit


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("k", ()),
        ("k", (10**17,)),
        ("k" * 1000, (1,)),
        ('"' * 1000, (1,)),
        ("é" * 500, (1,)),
        ("k", (1,) * 60 + (2**59,)),
    ],
)
def test_no_header_exceeds_its_estimate(key: str, shape: tuple[int, ...]) -> None:
    members = [spec(f"{number}{key}", "float8_e4m3fn", *shape, 1) for number in range(30)]
    assert len(FileMembers("f", 0, members).plan().header) <= header_limits(*members)


def test_a_long_shape_does_not_exceed_the_estimate_either() -> None:
    members = [spec(f"{number}", "uint8", *(10**18,) * 40, 0) for number in range(30)]
    assert len(FileMembers("f", 0, members).plan().header) <= header_limits(*members)


def test_the_estimate_of_a_header_covers_a_file_without_tensors() -> None:
    assert len(FileMembers("f", 0, ()).plan().header) <= header_limits()


def test_a_header_takes_at_most_half_of_what_readers_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec(f"key{number}", "uint8", 1) for number in range(6)]
    entry = header_limits(specs[0]) - header_limits()
    monkeypatch.setattr(limits, "HEADER_BYTES", 2 * 2 * entry)
    assert [len(file.members) for file in assign_to_files("g", specs, 1 << 30)] == [2, 2, 2]
    monkeypatch.setattr(limits, "HEADER_BYTES", 2 * 3 * entry - 2)
    assert [len(file.members) for file in assign_to_files("g", specs, 1 << 30)] == [2, 2, 2]


def test_a_file_has_at_most_half_of_the_tensors_that_readers_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_TENSORS", 6)
    specs = [spec(f"key{number}", "uint8", 1) for number in range(7)]
    assert [len(file.members) for file in assign_to_files("g", specs, 1 << 30)] == [3, 3, 1]


def test_runs_are_the_elements_of_any_range_in_the_order_of_the_file() -> None:
    specs = [spec("a", "uint16", 3, 2, 2), spec("none", "uint16", 0), spec("b", "uint16", 5)]
    places = split_group("g", specs, 1 << 30)[0].places
    kept = [place for place in places if place.spec.key != "none"]
    numbers = {"a": np.arange(12, dtype="u2").reshape(3, 2, 2), "b": np.arange(100, 105, dtype="u2"), "none": None}
    content = np.concatenate([numbers["a"].reshape(-1), numbers["b"]])
    first = places[0].begin
    for shown in (places, kept):
        begins = [place.begin for place in shown]
        for begin in range(18):
            for end in range(begin, 18):
                out = np.zeros(2 * (end - begin), dtype="u1")
                for run in runs_in(shown, begins, first + 2 * begin, 2 * (end - begin)):
                    array = numbers[run.place.spec.key]
                    data = np.ascontiguousarray(array[run.box.within(Box.full(array.shape))])
                    assert run.bytes == data.nbytes
                    out[run.at : run.at + run.bytes] = np.frombuffer(bytes_of(data), "u1")
                assert np.array_equal(out.view("u2"), content[begin:end])


def test_there_is_no_run_between_tensors_or_beyond_them() -> None:
    places = [Place(spec("a", "uint8", 4), "f", 10), Place(spec("b", "uint8", 4), "f", 30)]
    found = {
        offset: [(run.place.spec.key, run.at) for run in runs_in(places, [10, 30], offset, 5)] for offset in (0, 16, 50)
    }
    assert found == {0: [], 16: [], 50: []}
    assert [(run.place.spec.key, run.at) for run in runs_in(places, [10, 30], 0, 40)] == [("a", 10), ("b", 30)]


def test_a_piece_is_a_view_of_its_bytes_in_the_buffer_of_the_block() -> None:
    place = Place(spec("a", "uint16", 4, 3), "f", 0)
    run = TensorRun(place, Box((1, 0), (2, 3)), 4)
    piece = ShardPiece(run, Box((2, 1), (1, 2)), 0, Box((2, 1), (2, 2)))
    buffer = np.arange(20, dtype="u1")
    assert bytes_of(np.ascontiguousarray(piece_in_run(buffer, piece))) == bytes([12, 13, 14, 15])
    assert piece.bytes == 4
    assert np.shares_memory(piece_in_run(buffer, piece), buffer)


@pytest.mark.parametrize("size", [1, 4096, 5000])
def test_a_buffer_begins_at_a_page(size: int) -> None:
    buffer = aligned_buffer(size)
    assert len(buffer) == size and buffer.ctypes.data % 4096 == 0


def test_a_destination_in_memory_stores_a_part_in_its_place() -> None:
    array = np.zeros((3, 3), dtype="u2")
    destination = ArrayDestination(array)
    destination.put(Box((1, 2), (2, 1)), np.array([[5], [6]], dtype="u2"))
    assert array.tolist() == [[0, 0, 0], [0, 0, 5], [0, 0, 6]] and destination.direct() is array
