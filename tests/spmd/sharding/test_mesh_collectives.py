"""Collectives over mesh axes on a process group of torch's fake backend, which people use for dry runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
import holdfast.spmd

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
holdfast.spmd.enable()
mesh = init_device_mesh("cpu", (4,))
calls = [
    lambda x: torch.cat([x, x]),
    lambda x: x.diff(dim=0),
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: x.cumsum(0),
]
for rows in (8, 6):
    whole = torch.randn(rows, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for call in calls:
        assert call(x).shape == call(whole).shape
print("done")
"""


@pytest.mark.full
def test_a_fake_process_group_gives_the_shapes_of_one_device():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "done", done.stderr
