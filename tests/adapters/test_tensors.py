"""Tensors of every kind round-trip bit for bit, and memory that overlaps is found exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import holdfast
from holdfast.adapters.tensors import address_range, array_overlaps, tensor_overlaps

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float4_e2m1fn_x2",
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random_bits(dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_round_trips_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    state = {"w": {"a": random_bits(dtype, 5, 7), "scalar": random_bits(dtype), "none": random_bits(dtype, 0, 3)}}
    truth = {key: bits(value) for key, value in state["w"].items()}
    checkpoint = holdfast.save(tmp_path / "x", state)
    fresh = {"w": {key: torch.empty_like(value) for key, value in state["w"].items()}}
    holdfast.load(tmp_path / "x", fresh)
    assert {key: bits(value) for key, value in fresh["w"].items()} == truth
    found = checkpoint.find("a")
    assert found.logical == dtype
    assert found.logical_shape == (5, 7)
    array = checkpoint.read("a")
    if dtype == "complex32":
        assert array.dtype == np.complex64  # numpy has no smaller one
    else:
        assert array.tobytes() == truth["a"]


def test_safetensors_reads_what_it_has_a_name_for(tmp_path: Path) -> None:
    state = {"w": {dtype: random_bits(dtype, 4, 6) for dtype in DTYPES}}
    holdfast.save(tmp_path / "x", state)
    with safe_open(tmp_path / "x" / "w-00001-of-00001.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(DTYPES)
        for dtype in set(DTYPES) - {"complex32", "complex128", "float4_e2m1fn_x2"}:
            assert bits(file.get_tensor(dtype)) == bits(state["w"][dtype]), dtype


def test_strides_conjugates_and_views_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"w": {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "negative": torch.view_as_complex(torch.randn(3, 2)).conj().imag,
    }}  # fmt: skip
    checkpoint = holdfast.save(tmp_path / "x", state)
    for key, tensor in state["w"].items():
        assert np.array_equal(checkpoint.read(key), tensor.resolve_conj().resolve_neg().numpy()), key


def test_a_load_fills_strided_memory_in_place(tmp_path: Path) -> None:
    truth = torch.randn(4, 6)
    holdfast.save(tmp_path / "x", {"w": {"a": truth}})
    memory = torch.zeros(6, 4)
    holdfast.load(tmp_path / "x", {"w": {"a": memory.t()}})
    assert torch.equal(memory.t(), truth)


@pytest.mark.parametrize(
    "value", [torch.zeros(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(2, dtype=torch.bits8)]
)
def test_what_cannot_be_stored_is_refused_by_key(tmp_path: Path, value: Any) -> None:
    with pytest.raises(holdfast.Unsupported, match="w: odd"):
        holdfast.save(tmp_path / "x", {"w": {"odd": value}})
    assert not list(tmp_path.iterdir())


def test_odd_keys_round_trip_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    good = ["é", "a b", "../../etc/x", "a/b", "$x", "%2e%2e", "x" * 1024, "\\", "0"]
    state = {"w": {key: torch.full((2,), float(index)) for index, key in enumerate(good)}}
    holdfast.save(tmp_path / "x", state)
    fresh = {"w": {key: torch.zeros(2) for key in good}}
    holdfast.load(tmp_path / "x", fresh)
    assert all(fresh["w"][key][0] == index for index, key in enumerate(good))
    for bad in ("", "__metadata__", "a\nb", "x" * 1025, "\x7f"):
        with pytest.raises(holdfast.Unsupported):
            holdfast.save(tmp_path / "y", {"w": {"fine": torch.zeros(1), bad: torch.zeros(1)}})


def test_names_in_the_state_that_cannot_be_files_are_refused(tmp_path: Path) -> None:
    for bad in ("../up", "a b", "", ".hidden", "con", "x" * 200, "a/b/c"):
        with pytest.raises(holdfast.Unsupported):
            holdfast.save(tmp_path / "x", {bad: {"w": torch.zeros(1)}})
    with pytest.raises(holdfast.Unsupported, match="differ only by case"):
        holdfast.save(tmp_path / "x", {"Model": {"w": torch.zeros(1)}, "model": {"w": torch.zeros(1)}})


def test_overlap_is_what_counting_addresses_finds() -> None:
    sizes, strides = (1, 2, 3), (0, 1, 2, 3, 4, 5, 7)
    for shape in itertools.product(sizes, repeat=3):
        for steps in itertools.product(strides, repeat=3):
            tensor = torch.empty(50).as_strided(shape, steps)
            places = {sum(a * b for a, b in zip(index, steps, strict=True)) for index in np.ndindex(*shape)}
            assert tensor_overlaps(tensor) == (len(places) < tensor.numel()), (shape, steps)


def test_overlap_of_arrays_counts_bytes() -> None:
    memory = np.zeros(40, np.uint8)
    for step in range(1, 9):
        array = np.ndarray((4,), np.int32, memory, strides=(step,))
        assert array_overlaps(array) == (step < 4), step
    assert array_overlaps(np.broadcast_to(np.ones(1), (3,))) and not array_overlaps(np.broadcast_to(np.ones(3), (1, 3)))
    assert not array_overlaps(np.arange(9)[::-2]) and not array_overlaps(np.zeros((0, 3))[:, ::2])


def test_addresses_of_a_view() -> None:
    base = torch.zeros(10, dtype=torch.float64)
    begin = base.data_ptr()
    assert address_range(base[2:8:2]) == (begin + 16, begin + 56)
    assert address_range(base[:0]) == (0, 0)


def ema(model: nn.Module) -> holdfast.EMA:
    average = holdfast.EMA(model, 0.5)
    average._averages["weight"] = torch.zeros(1, 3).expand(3, 3)
    return average


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made.state[model.weight]["momentum_buffer"] = torch.zeros(3, 1).expand(3, 3)
    return made


def linear() -> Any:
    return nn.Linear(3, 3, bias=False)


def with_weight(weight: torch.Tensor) -> nn.Module:
    model = linear()
    model.weight = nn.Parameter(weight)
    return model


def saved_state() -> dict[str, Any]:
    model = linear()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    own.step()
    tree = {"t": torch.arange(9.0).view(3, 3), "a": np.arange(9.0).reshape(3, 3)}
    return {"model": model, "optimizer": own, "ema": holdfast.EMA(model, 0.5), "tree": tree}


@pytest.mark.parametrize(
    ("live", "named"),
    [
        ({"model": lambda m: with_weight(torch.zeros(1, 3).expand(3, 3))}, "model: weight"),
        ({"model": lambda m: with_weight(torch.zeros(20).as_strided((3, 3), (2, 1)))}, "model: weight"),
        ({"model": lambda m: m, "optimizer": optimizer}, "optimizer: weight/momentum_buffer"),
        ({"model": lambda m: m, "ema": ema}, "ema/model: weight"),
        ({"tree": lambda m: {"t": torch.zeros(3, 1).expand(3, 3), "a": np.zeros((3, 3))}}, "tree: t"),
        ({"tree": lambda m: {"t": torch.zeros(3, 3), "a": np.broadcast_to(np.zeros(3), (3, 3))}}, r"tree\.a"),
    ],
)
def test_memory_that_overlaps_itself_is_refused_before_anything_is_touched(
    tmp_path: Path, live: dict[str, Any], named: str
) -> None:
    holdfast.save(tmp_path / "x", saved_state())
    model = linear()
    state = {name: make(model) for name, make in live.items()}
    before = model.weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(holdfast.LayoutError, match=rf"{named}: several elements of the live .* share memory"):
            holdfast.load(tmp_path / "x", state, strict=strict)
    assert torch.equal(model.weight, before)


def test_an_expanded_tensor_that_is_left_out_is_no_obstacle(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"tree": {"t": torch.ones(3, 3), "u": torch.ones(2)}})
    live = {"t": torch.zeros(1, 3).expand(3, 3), "u": torch.zeros(2)}
    holdfast.load(tmp_path / "x", {"tree": live}, ignore=["tree/t"])
    array: dict[str, Any] = {"t": np.broadcast_to(np.zeros(3, np.float32), (3, 3)), "u": torch.zeros(2)}
    holdfast.load(tmp_path / "x", {"tree": array}, ignore=["tree/t"])
    assert array["u"].tolist() == [1, 1] and not array["t"].any()
    assert live["u"].tolist() == [1, 1] and not live["t"].any()


def test_dims_of_one_and_steps_without_overlap_are_filled(tmp_path: Path) -> None:
    saved = {"row": torch.arange(3.0).view(1, 3), "steps": torch.arange(6.0).view(2, 3)}
    holdfast.save(tmp_path / "x", {"tree": saved})
    live = {"row": torch.zeros(3).expand(1, 3), "steps": torch.zeros(8).as_strided((2, 3), (3, 2))}
    holdfast.load(tmp_path / "x", {"tree": live})
    assert all(torch.equal(live[key], saved[key]) for key in saved)
