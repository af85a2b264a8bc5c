"""Reads and writes past the page cache: the same bytes, nothing left in the cache, a refusal where it would not pay."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from holdfast.core.errors import Damaged, StorageError
from holdfast.plan.files import aligned_buffer
from holdfast.storage.linux import cached_bytes
from holdfast.storage.local_files import LocalReader, LocalWriter
from holdfast.storage.uncached import UncachedFile

PAGE = 4096


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE + 100))
    return path


def evict(path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    left = cached_bytes(descriptor, 0, 0)
    os.close(descriptor)
    if left is None:
        pytest.skip("this kernel has no cachestat")
    if left:
        pytest.skip("this file system keeps the pages of a file that was evicted")


def test_cached_bytes_are_counted(file):
    descriptor = os.open(file, os.O_RDONLY)
    evict(file)
    assert cached_bytes(descriptor, 0, 64 * PAGE) == 0
    file.read_bytes()
    assert cached_bytes(descriptor, 0, 64 * PAGE) == 64 * PAGE
    os.close(descriptor)


def test_what_is_not_cached_is_read_and_stays_out_of_the_cache(file):
    data = file.read_bytes()
    evict(file)
    reader = LocalReader(file, mappable=True)
    buffer = aligned_buffer(65 * PAGE)
    if not reader.read_uncached(0, buffer.data):
        reader.close()
        pytest.skip("this file system has no direct reads")
    assert buffer[: len(data)].tobytes() == data
    assert cached_bytes(reader._descriptor, 0, 64 * PAGE) == 0
    reader.close()


def test_what_is_cached_is_left_to_the_cache(file):
    file.read_bytes()
    reader = LocalReader(file, mappable=True)
    assert reader.is_cached(0, 64 * PAGE)
    evict(file)
    assert not reader.is_cached(0, 64 * PAGE)
    reader.close()


def test_a_file_on_another_host_is_never_read_so(file):
    evict(file)
    reader = LocalReader(file, mappable=False)
    assert reader.is_cached(0, 64 * PAGE)
    assert not reader.read_uncached(0, aligned_buffer(64 * PAGE).data)
    reader.close()


def test_a_file_that_was_cut_short_is_damaged(file):
    evict(file)
    reader = LocalReader(file, mappable=True)
    os.truncate(file, 10 * PAGE)
    evict(file)
    with pytest.raises(Damaged, match="too early"):
        if not reader.read_uncached(0, aligned_buffer(64 * PAGE).data):
            reader.read_into(0, [memoryview(bytearray(64 * PAGE))])
    reader.close()


def test_without_proc_or_direct_reads_it_refuses(file, monkeypatch):
    evict(file)
    descriptor = os.open(file, os.O_RDONLY)

    def refuse(*arguments, **options):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    uncached = UncachedFile(descriptor)
    assert uncached.read(0, aligned_buffer(PAGE).data) is None
    uncached.close()
    os.close(descriptor)


def reserved(path, size: int) -> LocalWriter:
    path.write_bytes(bytes(size))
    evict(path)
    return LocalWriter(path, is_local=True)


def test_whole_pages_are_written_past_the_cache_and_the_rest_through_it(tmp_path):
    path = tmp_path / "out"
    buffer = aligned_buffer(16 * PAGE + 100)
    buffer[:] = np.frombuffer(os.urandom(buffer.nbytes), np.uint8)
    writer = reserved(path, PAGE + buffer.nbytes)
    if not writer.write_uncached(PAGE, buffer.data):
        writer.close()
        pytest.skip("this file system has no direct writes")
    assert cached_bytes(writer._descriptor, 0, 17 * PAGE) == 0
    writer.sync()
    writer.close()
    assert path.read_bytes() == bytes(PAGE) + buffer.tobytes()


@pytest.mark.parametrize(("offset", "size"), [(1, PAGE), (0, PAGE - 1)])
def test_parts_of_pages_are_not_written_past_the_cache(tmp_path, offset, size):
    writer = reserved(tmp_path / "out", 2 * PAGE)
    assert not writer.write_uncached(offset, aligned_buffer(size).data)
    writer.close()


def test_memory_that_is_not_aligned_is_left_to_the_cache(tmp_path):
    path = tmp_path / "out"
    writer = reserved(path, PAGE)
    data = aligned_buffer(2 * PAGE)[1 : 1 + PAGE]
    data[:] = 7
    if not writer.write_uncached(0, data.data):
        writer.write(0, [data.data])
    writer.close()
    assert path.read_bytes() == bytes([7]) * PAGE


def test_a_file_on_another_host_is_never_written_so(tmp_path):
    (tmp_path / "out").write_bytes(bytes(PAGE))
    writer = LocalWriter(tmp_path / "out")
    assert not writer.write_uncached(0, aligned_buffer(PAGE).data)
    writer.close()


def test_a_full_disk_is_reported_by_writes_past_the_cache(tmp_path, monkeypatch):
    writer = reserved(tmp_path / "out", PAGE)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        if not writer.write_uncached(0, aligned_buffer(PAGE).data):
            writer.write(0, [aligned_buffer(PAGE).data])
    writer.close()
