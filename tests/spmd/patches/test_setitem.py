"""`x[a:b] = v` and `x[a:b] += v`, where the value shares memory with the region that is written."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks


def _add_to_part_of_column(x):
    x[1:, 0] += 1


def _add_to_column(x):
    x[:, 0] += 3


def _add_to_one_row(x):
    x[0:1] += 2


def _add_to_element(x):
    x[-1, -1] += 5


def _add_to_transposed(x):
    x.T[0] += 3


def _multiply_transposed(x):
    x.mT[0:1] *= 3


def _add_to_steps(x):
    x[::2, :1] -= 4


def _move_rows(x):
    x[:-1] = x[1:].clone()


def _copy_last_column_to_first(x):
    x[:, 0:1] = x[:, -1:]


WRITES = (
    _add_to_part_of_column, _add_to_column, _add_to_one_row, _add_to_element, _add_to_transposed, _multiply_transposed,
    _add_to_steps, _move_rows, _copy_last_column_to_first,
)  # fmt: skip


def _written(shape):
    """Return the writes, and the placements, for which a tensor is not as on one device."""
    import torch.distributed as dist

    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for write in WRITES:
        for place in (Replicate(), Shard(0), Shard(1)):
            whole = torch.arange(6.0 * 6).reshape(6, 6)[: shape[0], : shape[1]].clone()
            shards = distribute_tensor(whole.clone(), mesh, [place])
            write(whole)
            write(shards)
            if not torch.equal(shards.full_tensor(), whole):
                wrong.append((write.__name__, str(place)))
    return wrong


@pytest.mark.parametrize(("ranks", "shape"), [(2, (2, 3)), (2, (4, 1)), (3, (5, 3))])
def test_writes_into_a_view_are_those_of_one_device(ranks, shape):
    assert run_ranks(ranks, _written, shape, deadline_s=60) == [[]] * ranks


def _overlapping(place):
    import holdfast.spmd

    holdfast.spmd.enable()
    x = distribute_tensor(torch.arange(6.0).reshape(3, 2), init_device_mesh("cpu", (2,)), [place])
    x[1:] = x[:-1]  # one device raises; here only some ranks would, and the others would wait for them
    return x.full_tensor().tolist()


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)])
def test_a_value_that_the_write_overlaps_is_read_first(place):
    assert run_ranks(2, _overlapping, place, deadline_s=60) == [[[0.0, 1.0], [0.0, 1.0], [2.0, 3.0]]] * 2


REINTERPRETED = {"bits": lambda x: x.view(torch.int32), "negated": lambda x: x._neg_view(), "conjugate": torch.conj}


def _reinterpreted(name, place):
    """Write the values of a tensor's own memory, read in another way; return the tensor, and one device's."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, results = init_device_mesh("cpu", (2,)), []
    for is_sharded in (False, True):
        whole = torch.arange(8.0).reshape(4, 2)
        whole = torch.view_as_complex(whole) if name == "conjugate" else whole
        x = distribute_tensor(whole, mesh, [place]) if is_sharded else whole
        value = REINTERPRETED[name](x)
        x[:] = value if is_sharded else value.clone()
        results.append((x.full_tensor() if is_sharded else x).tolist())
    return results[0] == results[1]


@pytest.mark.parametrize("name", REINTERPRETED)
@pytest.mark.parametrize("place", [Replicate(), Shard(0)])
def test_a_value_that_reads_the_same_memory_differently(name, place):
    assert run_ranks(2, _reinterpreted, name, place, deadline_s=60) == [True, True]


def _plain_overlap():
    import holdfast.spmd

    holdfast.spmd.enable()
    x = distribute_tensor(torch.arange(6.0).reshape(3, 2), init_device_mesh("cpu", (2,)), [Replicate()])
    x[1:] = x.to_local()[:-1]
    return x.full_tensor().tolist()


def test_a_plain_value_of_the_same_memory():
    assert run_ranks(2, _plain_overlap, deadline_s=60) == [[[0.0, 1.0], [0.0, 1.0], [2.0, 3.0]]] * 2
