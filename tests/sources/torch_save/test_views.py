"""Views of a storage: any strides, read from the bytes of the file, equal what torch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import Damaged, Unsupported
from holdfast.sources import open_stored
from holdfast.sources.torch_save.torch_names import PickledStorage, PickledTensor
from holdfast.sources.torch_save.views import view_recipe

BASE = torch.arange(480.0).reshape(4, 5, 6, 4)
VIEWS = {
    "whole": (BASE, 1),
    "permuted": (BASE.permute(2, 0, 3, 1), 1),
    "columns": (BASE[:, 1:3], 1),
    "last columns": (BASE[:, :, 3:, 2:], 1),
    "rows": (BASE[2:], 1),
    "selected": (BASE[:, 2], 1),
    "selected last": (BASE[..., 1], 1),
    "flat": (torch.arange(100.0)[7:47].reshape(4, 10), 1),
    "turned part": (torch.arange(40.0).reshape(4, 10)[:, 5:].T, 1),
    "ones": (torch.arange(5.0).reshape(1, 5, 1).transpose(0, 2), 1),
    "scalar": (torch.tensor(3.0), 1),
    "a scalar of many": (torch.arange(9.0)[4], 1),
    "empty": (torch.empty(3, 0), 1),
    "expanded": (torch.arange(3.0).reshape(3, 1).expand(3, 4), 4),
    "every second": (torch.arange(20.0)[::2], 1),
    "crossing": (torch.arange(50.0).as_strided((3, 4), (3, 2)), 3),
}


def read_all(tmp_path: Path, tensors: dict[str, Any], *, zipped: bool):
    torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    return open_stored(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_views_are_read_in_few_pieces(tmp_path, zipped):
    found = read_all(tmp_path, {name: view for name, (view, _) in VIEWS.items()}, zipped=zipped)
    for name, (view, pieces) in VIEWS.items():
        assert np.array_equal(found.read(name), view.numpy()), name
        assert len(found.find(name).recipe.terms) == pieces, name


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_strides_are_read_as_torch_has_them(tmp_path_factory, data):
    rank = data.draw(st.integers(0, 4))
    shape = data.draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
    strides = data.draw(st.lists(st.integers(0, 30), min_size=rank, max_size=rank))
    offset = data.draw(st.integers(0, 20))
    extent = offset + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    storage = torch.arange(float(extent + data.draw(st.integers(0, 5))))
    view = storage.as_strided(shape, strides, offset)
    found = read_all(tmp_path_factory.mktemp("view"), {"x": view, "all": storage}, zipped=data.draw(st.booleans()))
    assert np.array_equal(found.read("x"), view.numpy())
    assert np.array_equal(found.read("all"), storage.numpy())


@pytest.mark.parametrize(
    "dtype",
    (
        "float64 float16 bfloat16 int8 uint8 int16 int64 bool complex64 complex128 uint16 uint32 "
        "float8_e4m3fn float8_e5m2"
    ).split(),
)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    raw = torch.randint(0, 2, (4, 6 * 16), dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype))
    found = read_all(tmp_path, {"x": tensor, "t": tensor.T}, zipped=True)
    assert found.read("x").tobytes() == raw.numpy().tobytes()
    assert found.read("t").tobytes() == np.ascontiguousarray(found.read("x").T).tobytes()
    assert found.read("x").shape == tuple(tensor.shape)


def recipe(shape, strides, offset=0, elements=10):
    tensor = PickledTensor(PickledStorage("0", "float32", elements), "float32", offset, shape, strides)
    return view_recipe(tensor, "x", "f", 100, 4 * elements, "test")


def test_a_view_past_its_storage_is_damage():
    for shape, strides, offset in (((11,), (1,), 0), ((2,), (10,), 0), ((1,), (1,), 10), ((2**40, 2**40), (1, 1), 0)):
        with pytest.raises(Damaged, match="of its storage, which has 40 bytes"):
            recipe(shape, strides, offset)


def test_a_view_of_too_many_pieces_is_refused():
    with pytest.raises(Unsupported, match="too irregular"):
        recipe((2**20, 2), (0, 1))


def test_tensors_that_share_bytes_are_all_there(tmp_path):
    base = torch.arange(64.0)
    tensors = {"a": base, "b": base[3:19], "c": base[10:42].reshape(4, 8), "d": base}
    found = read_all(tmp_path, tensors, zipped=True)
    assert dict(found.contents.groups["model"].aliases) == {"d": "a"}
    for key, tensor in tensors.items():
        assert np.array_equal(found.read(key), tensor.numpy()), key


def test_a_small_file_does_not_become_a_large_tensor(tmp_path):
    torch.save({"x": torch.zeros(1).expand(3000, 3000)}, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="repeats the 4 bytes"):
        open_stored(tmp_path / "x.pt")


def test_one_tensor_under_very_many_keys(tmp_path):
    step = torch.tensor(5.0)
    found = read_all(
        tmp_path, {"model": {"w": torch.ones(2)}, "steps": {str(n): step for n in range(1000)}}, zipped=True
    )
    assert found.read("999", "steps") == 5 and len(found.contents.files) == 1
