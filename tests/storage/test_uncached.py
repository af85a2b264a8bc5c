"""Reads past the page cache: the same bytes, nothing left in the cache, and a refusal where it would not pay."""

from __future__ import annotations

import os

import pytest

from holdfast.core.errors import Damaged
from holdfast.plan.files import aligned_buffer
from holdfast.storage.linux import cached_bytes
from holdfast.storage.local_files import LocalReader
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
