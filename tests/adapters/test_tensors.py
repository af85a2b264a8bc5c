"""Tensors of every kind round-trip bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import holdfast

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
