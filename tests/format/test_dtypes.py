import struct

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import dtype_from_code, dtype_named, numpy_dtype
from holdfast.format.safetensors import TensorEntry, decode_header, encode_header

PLAIN = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
]


def raw_bytes(name, count):
    bits = dtype_named(name).bits
    rng = np.random.default_rng(7)
    return rng.integers(0, 2 if name == "bool" else 256, count * bits // 8, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_that_holdfast_writes_opens_in_safetensors(name, tmp_path):
    dtype = dtype_named(name)
    data = raw_bytes(name, 6)
    path = tmp_path / "one.safetensors"
    path.write_bytes(encode_header([TensorEntry("a.b", dtype, (2, 3), 0, len(data))]) + data)
    with safetensors.safe_open(path, "pt") as file:
        assert list(file.keys()) == ["a.b"]
        assert file.metadata() == {"format": "pt"}
        tensor = file.get_tensor("a.b")
    assert tensor.dtype is getattr(torch, name)
    assert tuple(tensor.shape) == (2, 3)
    assert tensor.view(torch.uint8).numpy().tobytes() == data


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_that_safetensors_writes_is_read(name, tmp_path):
    data = bytearray(raw_bytes(name, 6))
    tensor = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, name)).reshape(3, 2)
    path = tmp_path / "one.safetensors"
    safetensors.torch.save_file({"x": tensor}, path)
    written = path.read_bytes()
    length = 8 + struct.unpack("<Q", written[:8])[0]
    (entry,) = decode_header(written[:length], len(written), "one")
    assert (entry.key, entry.dtype.name, entry.shape) == ("x", name, (3, 2))
    assert written[length + entry.begin : length + entry.end] == bytes(data)


@pytest.mark.parametrize("name", PLAIN)
def test_bits_are_those_of_the_numpy_dtype(name):
    dtype = dtype_named(name)
    assert numpy_dtype(name).itemsize * 8 == dtype.bits
    assert dtype.bytes == numpy_dtype(name).itemsize
    assert numpy_dtype(name).name == name


@pytest.mark.parametrize("name", PLAIN)
def test_bits_are_those_of_the_torch_dtype(name):
    assert getattr(torch, name).itemsize * 8 == dtype_named(name).bits


@pytest.mark.parametrize("name", PLAIN)
def test_a_code_leads_back_to_the_dtype_that_has_it(name):
    assert dtype_from_code(dtype_named(name).code) is dtype_named(name)


def test_values_of_small_floats_agree_with_torch():
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        ours = np.arange(256, dtype=np.uint8) if name != "bfloat16" else np.arange(0, 2**16, 7, dtype=np.uint16)
        theirs = torch.from_numpy(ours.copy()).view(getattr(torch, name)).float().numpy()
        assert np.array_equal(ours.view(numpy_dtype(name)).astype(np.float32), theirs, equal_nan=True), name


@pytest.mark.parametrize(
    ("name", "stored", "pair"),
    [("complex32", "float16", True), ("complex128", "float64", True), ("float4_e2m1fn_x2", "uint8", False)],
)
def test_what_safetensors_cannot_name_is_stored_as_something_it_can(name, stored, pair):
    dtype = dtype_named(name)
    assert (dtype.stored, dtype.pair) == (stored, pair)
    assert dtype.code == dtype_named(stored).code
    assert dtype_from_code(dtype.code) is dtype_named(stored)
    assert numpy_dtype(name) == numpy_dtype(stored)


@pytest.mark.parametrize("name", ["float128", "str", "object", "qint8", "", "F32", "Float32"])
def test_an_unknown_dtype_is_refused_with_what_there_is(name):
    with pytest.raises(Unsupported, match=r"cannot be stored; the format has .*float32"):
        dtype_named(name)


@pytest.mark.parametrize("code", ["", "f32", "F128", "float32", "F32 ", "C128", "F4"])
def test_an_unknown_code_is_no_dtype(code):
    assert dtype_from_code(code) is None
