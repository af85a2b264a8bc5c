"""What a redistribution moves, against what it is said to move."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.spmd import redistribute_cost
from holdfast.spmd.base.spmd_errors import SpmdArgumentError
from tests.spmd.autoplan.meshes import pretended_mesh
from tests.spmd.listening import Listener


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
        (1, "reduce_scatter", whole // 4),  # of the half that a rank has
        (0, "all_gather", whole // 4),  # of the columns that are left to it
    ]


class _Heard(Listener):
    """Counts by the ranks of each collective's own group."""

    def _bytes(self, name, args):
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            self._ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
        return super()._bytes(name, args)


@pytest.mark.parametrize("sizes", [(8, 8), (7, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize("axes", [("a", 4), ("a", 2, "b", 2), ("a", 2, "b", 4)], ids=["4", "2x2", "2x4"])
def test_what_is_said_is_what_a_redistribution_moves(axes, sizes):
    whole, places = torch.Size(sizes), (Replicate(), Shard(0), Shard(1), Partial())
    with pretended_mesh(*axes) as mesh:
        for present in itertools.product(places, repeat=mesh.ndim):
            shards = [Replicate() if isinstance(place, Partial) else place for place in present]
            local = distribute_tensor(torch.zeros(sizes), mesh, shards, src_data_rank=None).to_local()
            tensor = DTensor.from_local(local, mesh, present, run_check=False, shape=whole, stride=(sizes[1], 1))
            for wanted in itertools.product(places[:3], repeat=mesh.ndim):
                with _Heard(1) as heard:
                    tensor.redistribute(placements=wanted)
                said = redistribute_cost(tensor, wanted)
                assert sum(move.bytes for move in said) == heard.bytes, (present, wanted, said, heard.received)


def test_axes_that_torch_moves_at_once_over_a_flattened_mesh_are_heard():
    with pretended_mesh("a", 2, "b", 3) as mesh:
        mesh._flatten("together")
        for present, wanted in (((Shard(0), Shard(0)), Replicate()), ((Partial(), Partial()), Replicate())):
            tensor = DTensor.from_local(torch.zeros(6, 4), mesh, present, run_check=False)
            with _Heard(1) as heard:
                tensor.redistribute(placements=[wanted, wanted])
            said = redistribute_cost(tensor, [wanted, wanted])
            assert heard.bytes > 0 and [move.bytes for move in said] == [heard.bytes, 0]
            assert [move.axis for move in said] == [0, 1] and "slice" not in {move.collective for move in said}


def test_nothing_moves_to_where_it_is(tensor):
    assert redistribute_cost(tensor, [Shard(0), Partial()]) == ()


def test_a_slice_is_free(tensor):
    replica = DTensor.from_local(torch.zeros(8, 8), tensor.device_mesh, [Replicate(), Replicate()], run_check=False)
    assert [(move.collective, move.bytes) for move in redistribute_cost(replica, [Shard(0), Shard(1)])] == [
        ("slice", 0),
        ("slice", 0),
    ]


def test_wrong_placements_are_refused(tensor):
    with pytest.raises(SpmdArgumentError, match="one placement per axis"):
        redistribute_cost(tensor, [Shard(0)])
    with pytest.raises(SpmdArgumentError, match="nothing is redistributed to"):
        redistribute_cost(tensor, [Partial(), Partial()])
    for dim in (2, -3):
        with pytest.raises(SpmdArgumentError, match=r"axis 1: .* of a tensor of 2 dims"):
            redistribute_cost(tensor, [Replicate(), Shard(dim)])
    for given in (None, Shard(0), ["S0", "R"]):
        with pytest.raises(SpmdArgumentError, match="give a list of Replicate"):
            redistribute_cost(tensor, given)
    with pytest.raises(SpmdArgumentError, match="a Tensor has no placements"):
        redistribute_cost(torch.zeros(8, 8), [Replicate(), Replicate()])


def test_a_dim_may_be_counted_from_the_last(tensor):
    assert redistribute_cost(tensor, [Shard(-2), Partial()]) == ()
    assert [move.wanted for move in redistribute_cost(tensor, [Shard(-1), Partial()])] == [Shard(1)]
