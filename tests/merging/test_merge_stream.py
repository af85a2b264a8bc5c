import itertools
import json
import os
import struct
import subprocess
import sys

import pytest

from holdfast.convert.spans import TensorFile
from holdfast.core.ranks import SingleProcess
from holdfast.format.dtypes import dtype_named
from holdfast.merging.merge_stream import blocks_of, blocks_of_rank
from holdfast.plan.files import TensorSpec, split_group


def files(max_shard_bytes=10**9):
    specs = [TensorSpec(f"w{number}", dtype_named("bfloat16"), (10, 30 + number)) for number in range(5)]
    planned = split_group("model", specs, max_shard_bytes)
    return [TensorFile("model", plan, ()) for plan in planned]


def test_the_ranges_of_blocks_fill_every_tensor_once():
    seen: dict[str, list[tuple[int, int]]] = {}
    for block in blocks_of(files(), 256):
        filled = len(block.header)
        for place, start, stop, at in block.ranges():
            assert at == filled
            filled += (stop - start) * 2
            seen.setdefault(place.spec.key, []).append((start, stop))
        assert filled == block.size
    for number in range(5):
        ranges = seen[f"w{number}"]
        assert ranges[0][0] == 0 and ranges[-1][1] == 10 * (30 + number)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("whole_files", [False, True])
def test_every_block_is_that_of_one_rank(whole_files):
    blocks = blocks_of(files(1300), 256)
    shares = []
    for rank in range(3):
        ranks = SingleProcess()
        ranks.rank, ranks.world = rank, 3
        shares.append(blocks_of_rank(blocks, ranks, whole_files=whole_files))
    assert sorted(id(block) for share in shares for block in share) == sorted(map(id, blocks))
    if whole_files:
        assert not {b.file for b in shares[0]} & {b.file for b in shares[1]}


def write_sparse(path, rows):
    """A model of one tensor of zeros that takes no room on the disk."""
    path.mkdir()
    size = rows * 1024 * 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return path


@pytest.mark.full
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_the_peak_does_not_depend_on_the_largest_tensor(tmp_path, method):
    peaks = []
    for rows in (20_000, 120_000):  # 40 and 240 MB
        models = [write_sparse(tmp_path / f"{rows}-{name}", rows) for name in "ab"]
        command = [sys.executable, "-m", "tests.merging.memory", method, str(tmp_path / f"out{rows}")]
        done = subprocess.run([*command, *map(str, models)], capture_output=True, text=True, check=True, env=os.environ)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 15e6 and peaks[1] < 120e6
