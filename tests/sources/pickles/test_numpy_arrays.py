"""numpy arrays and scalars in pickles, of every protocol and dtype."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

from holdfast.core.errors import Damaged, Unsupported
from holdfast.format.dtypes import numpy_dtype
from holdfast.sources.pickles import (
    COMMON,
    NUMPY,
    Record,
    array_of,
    is_array,
    is_scalar,
    read_pickle,
    scalar_value,
    span_bytes,
)
from tests.sources.made import reader

NAMES = {**COMMON, **NUMPY}
DTYPES = ("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64").split()


def read_array(stream: bytes):
    record = read_pickle(reader(stream), "test", NAMES).value
    assert is_array(record)
    found = array_of(record, "test")
    raw = span_bytes(reader(stream), found.data, "test")
    shape = found.shape[::-1] if found.fortran else found.shape
    array = np.frombuffer(raw, numpy_dtype(found.dtype.name)).reshape(shape)
    return array.T if found.fortran else array


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (7, 5, 11)])
def test_arrays_come_out_as_they_went_in(protocol, dtype, shape):
    rng = np.random.default_rng(0)
    for array in (rng.integers(0, 2, shape).astype(dtype), np.asfortranarray(rng.integers(0, 2, shape)).astype(dtype)):
        found = read_array(pickle.dumps(array, protocol))
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("protocol", range(6))
def test_scalars(protocol):
    for value in (np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(2), np.complex128(1 + 2j)):
        record = read_pickle(reader(pickle.dumps(value, protocol)), "test", NAMES).value
        assert is_scalar(record)
        found = scalar_value(record, "test")
        assert found == value and found.dtype == value.dtype


@pytest.mark.parametrize(
    "array",
    [np.array([{}], dtype=object), np.zeros(2, "datetime64[s]"), np.zeros(2, [("a", "i4")]), np.array(["text"])],
    ids=["objects", "dates", "structure", "texts"],
)
def test_arrays_of_something_else_than_numbers_are_refused(array):
    with pytest.raises(Unsupported):
        read_array(pickle.dumps(array, 2))


def test_big_endian_arrays_are_refused():
    with pytest.raises(Unsupported, match="big-endian"):
        read_array(pickle.dumps(np.zeros(2, ">f4"), 4))


@pytest.mark.parametrize("shape", [(2**70,), (-1,), (2**30, 2**40), tuple([1] * 65), "x", ("a",)])
def test_a_shape_that_is_none_is_damage(shape):
    record = read_pickle(reader(pickle.dumps(np.zeros(4), 4)), "test", NAMES).value
    broken = Record(record.name, record.arguments, (1, shape, *record.state[2:]))
    with pytest.raises(Damaged):
        array_of(broken, "test")


def test_bytes_that_do_not_fit_the_shape_are_damage():
    record = read_pickle(reader(pickle.dumps(np.zeros(4), 4)), "test", NAMES).value
    broken = Record(record.name, record.arguments, (1, (5,), *record.state[2:]))
    with pytest.raises(Damaged, match="has 32 bytes, expected 40"):
        array_of(broken, "test")
