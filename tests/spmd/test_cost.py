"""What a redistribution moves, against what it is said to move."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.core.errors import InvalidArgument
from holdfast.spmd import redistribute_cost


@pytest.fixture
def tensor():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2))
    yield DTensor.from_local(torch.zeros(8, 8), mesh, [Shard(0), Partial()], run_check=False)
    dist.destroy_process_group()


def test_each_axis_says_its_collective_and_bytes(tensor):
    whole = 16 * 8 * 4
    moves = redistribute_cost(tensor, [Replicate(), Shard(1)])
    assert [(move.axis, move.collective, move.bytes) for move in moves] == [
        (0, "all_gather", whole // 2),
        (1, "reduce_scatter", whole // 2),
    ]


def test_nothing_moves_to_where_it_is(tensor):
    assert redistribute_cost(tensor, [Shard(0), Partial()]) == ()


def test_a_slice_is_free(tensor):
    replica = DTensor.from_local(torch.zeros(8, 8), tensor.device_mesh, [Replicate(), Replicate()], run_check=False)
    assert [(move.collective, move.bytes) for move in redistribute_cost(replica, [Shard(0), Shard(1)])] == [
        ("slice", 0),
        ("slice", 0),
    ]


def test_wrong_placements_are_refused(tensor):
    with pytest.raises(InvalidArgument, match="one placement per axis"):
        redistribute_cost(tensor, [Shard(0)])
    with pytest.raises(InvalidArgument, match="nothing is redistributed to"):
        redistribute_cost(tensor, [Partial(), Partial()])
