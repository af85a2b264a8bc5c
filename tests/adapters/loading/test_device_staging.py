"""Flat tensors of a device take the bytes of rows; here on the CPU, with the same code."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from holdfast.adapters.loading.device_staging import FlatTensor, staging_for
from holdfast.plan.files import byte_rows


@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_rows_arrive_where_they_belong_cast_or_not(live, seed):
    draw = random.Random(seed)
    rows, columns, width = draw.randint(1, 6), draw.randint(1, 9), draw.randint(1, 4)
    held = torch.zeros(rows, columns + width, dtype=live)
    truth = held.clone()
    first, count, column = draw.randint(0, rows - 1), 0, draw.randint(0, columns)
    count = draw.randint(1, rows - first)
    stored = torch.randn(count, width + draw.randint(0, 5))
    truth[first : first + count, column : column + width] = stored[:, :width].to(live)
    memory = np.frombuffer(stored.numpy().tobytes(), np.uint8).copy()
    data = byte_rows(memory, 0, 4 * stored.shape[1], count, 4 * width)
    pitch = 4 * held.shape[1]
    FlatTensor(held, torch.float32).write(first * pitch + 4 * column, pitch, data)
    assert torch.equal(held, truth)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float16, torch.int64], ids=str
)
def test_without_a_cast_bits_are_kept(dtype):
    held = torch.zeros(4, 3, dtype=dtype)
    item = dtype.itemsize
    memory = np.frombuffer(np.random.default_rng(0).bytes(2 * 3 * item), np.uint8).copy()
    data = byte_rows(memory, 0, 2 * item, 3, item)  # every second element
    FlatTensor(held, dtype).write(item, 3 * item, data)  # a column
    found = held.view(torch.uint8).numpy().reshape(4, 3, item)
    assert (found[:3, 1].tobytes() == data.tobytes()) and not found[3].any() and not found[:, 0].any()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_row_is_converted_from_its_stored_dtype_wherever_it_lies_in_memory(stored):
    held, values = torch.zeros(9), torch.randn(5).to(stored)
    memory = np.zeros(1 + 5 * stored.itemsize, np.uint8)
    memory[1:] = values.view(torch.uint8).numpy()  # an address that no element may have
    FlatTensor(held, stored).write(2 * stored.itemsize, 0, memory[1:].reshape(1, -1))
    assert torch.equal(held, torch.cat([torch.zeros(2), values.float(), torch.zeros(2)]))


def test_a_single_element_may_have_any_stride():
    held = torch.zeros(10)[::5][:1]
    assert held.stride() == (5,) and held.is_contiguous()
    FlatTensor(held, torch.float32).write(0, 4, np.frombuffer(np.float32(3).tobytes(), np.uint8).copy().reshape(1, 4))
    assert held.item() == 3


def test_in_inference_mode_the_caller_reads_alone():
    with torch.inference_mode():
        assert staging_for([torch.device("cpu")], 10**9, 1).threads == 1
    assert staging_for([torch.device("cpu")], 10**9, 10**6).threads == 1
