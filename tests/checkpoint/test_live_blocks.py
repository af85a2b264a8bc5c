"""A save of column shards: ranks of a host share what they pass on, and map little of it at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from tests.dist.harness import run_ranks

TENSORS, SIDE = 16, 1024  # 4 MiB each


def _mapped_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def _most_mapped_while_saving(path: str) -> int:
    """Return the most shared memory that this rank has mapped at a time, beyond what it had before."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        f"w{number}": DTensor.from_local(torch.full((SIDE, SIDE // 2), float(number)), mesh, [Shard(1)])
        for number in range(TENSORS)
    }
    before, found, done = _mapped_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            found.append(_mapped_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        holdfast.save(path, {"model": state}, block_bytes=4 << 20)
    finally:
        done.set()
        watcher.join()
    return max(found)


def test_a_rank_maps_few_blocks_of_what_others_pass_on(tmp_path: Path) -> None:
    passed_on = TENSORS * SIDE * SIDE * 4 // 4  # by each rank: half of its columns
    for most in run_ranks(2, _most_mapped_while_saving, str(tmp_path / "step"), deadline_s=120):
        assert most <= passed_on // 2
    whole = holdfast.open(tmp_path / "step").read("w3")
    assert whole.shape == (SIDE, SIDE) and bool((torch.as_tensor(whole) == 3).all())
