"""The threads and buffers of a load stay within its memory."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.core.errors import InvalidArgument
from holdfast.engine.options import LoadOptions
from holdfast.plan import staging
from holdfast.plan.staging import MOST_THREADS, SMALLEST_BUFFER_BYTES, portion_bytes_within, threads_and_buffer_bytes


@pytest.mark.parametrize("cores", [1, 2, 16, 200])
@pytest.mark.parametrize("memory_bytes", [32 * 10**6, 64 * 10**6, 100 * 10**6, 256 * 10**6, 10**10])
@pytest.mark.parametrize("neighbors", [1, 4, 8])
def test_all_buffers_fit_the_bound(monkeypatch, cores, memory_bytes, neighbors):
    monkeypatch.setattr(staging, "cores", lambda: cores)
    threads, size = threads_and_buffer_bytes(memory_bytes, neighbors, 2, 8 << 20)
    assert threads * 2 * size <= memory_bytes
    assert 1 <= threads <= min(MOST_THREADS, max(1, cores // neighbors))
    assert SMALLEST_BUFFER_BYTES <= size <= 8 << 20 and size & (size - 1) == 0
    plain, _ = threads_and_buffer_bytes(memory_bytes, neighbors, 1, SMALLEST_BUFFER_BYTES)
    portion = portion_bytes_within(memory_bytes, neighbors, 64 << 20)
    assert plain * (portion + SMALLEST_BUFFER_BYTES) <= memory_bytes and portion <= 64 << 20


def test_a_bound_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="memory_bytes='1MB'"):
        LoadOptions(memory_bytes="1MB")
    with pytest.raises(InvalidArgument, match="at least 32 MB"):
        holdfast.load(tmp_path, {}, memory_bytes=5)
