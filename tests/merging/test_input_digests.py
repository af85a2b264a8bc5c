"""Digests of the inputs: those of the whole files, however the merge proceeds and the ranks share the files."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.core.ranks import SingleProcess
from holdfast.format.digest import digest_hex
from holdfast.merging import input_digests
from holdfast.merging.input_digests import DigestedFiles, InputDigests
from holdfast.sources import open_source
from tests.merging.models import write


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(input_digests, "_PORTION_BYTES", 1000)
    found = []
    for name in "ab":
        path = write(tmp_path / name, max_shard_size="20KB")
        files = tuple(sorted(file.name for file in path.glob("*.safetensors")))
        assert len(files) > 2
        found.append(DigestedFiles(open_source(str(path)), threading.Lock(), files))
    return found


def expected(inputs, tmp_path):
    return [
        {name: digest_hex((tmp_path / folder / name).read_bytes()) for name in given.files}
        for folder, given in zip("ab", inputs, strict=True)
    ]


@pytest.mark.parametrize("shares", [(), (0.3, 0.1, 0.35, 0.9), (1.0, 1.0)])
def test_the_digests_are_those_of_the_files(inputs, tmp_path, shares):
    digests = InputDigests(inputs, SingleProcess())
    for share in shares:
        digests.advance(share)
    assert digests.collect(2) == expected(inputs, tmp_path)


def opened(inputs, change):
    """Let a function see every file that is opened."""
    for given in inputs:
        open_file = given.source.open_file
        given.source.open_file = lambda name, open_file=open_file: change(name, open_file(name))


def unmappable(name, reader):
    reader.mappable = False
    return reader


@pytest.mark.parametrize("mappable", [True, False])
def test_threads_may_advance_at_once(inputs, tmp_path, mappable):
    if not mappable:
        opened(inputs, unmappable)
    digests = InputDigests(inputs, SingleProcess())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(digests.advance, [step / 50 for step in range(50)]))
    assert digests.collect(3) == expected(inputs, tmp_path)


def test_a_file_is_digested_as_far_as_the_merge_is(inputs):
    read = []

    def noted(name, reader):
        read.append(name)
        return reader

    opened(inputs, noted)
    digests = InputDigests(inputs, SingleProcess())
    digests.advance(0.01)
    assert read == [inputs[0].files[0], inputs[1].files[0]]
    digests.advance(1.0)
    assert sorted(read) == sorted([*inputs[0].files, *inputs[1].files])
    digests.close()


def test_the_ranks_share_the_files(inputs, tmp_path):
    merged = [{}, {}]
    for rank in range(3):
        ranks = SingleProcess()
        ranks.rank, ranks.world = rank, 3
        for found, own in zip(merged, InputDigests(inputs, ranks).collect(2), strict=True):
            assert not found.keys() & own.keys()
            found.update(own)
    assert merged == expected(inputs, tmp_path)


def test_files_are_closed_after_a_failure(inputs):
    before = len(os.listdir("/proc/self/fd"))
    digests = InputDigests(inputs, SingleProcess())
    digests.advance(0.5)
    assert len(os.listdir("/proc/self/fd")) > before
    digests.close()
    assert len(os.listdir("/proc/self/fd")) == before
