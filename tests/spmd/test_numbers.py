"""A DTensor as a number is the number of the whole tensor, however it is placed; random numbers by shard."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.dist.harness import run_ranks
from tests.spmd.judge import place

READERS = {
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "tolist": lambda x: x.tolist(),
    "format": lambda x: f"{x.item():.1f}",
}


def _partial(mesh, value, dtype, how="sum"):
    """A number of which each rank has another part: 1, 2, ... up to `value` in all."""
    rank, world = torch.distributed.get_rank(), mesh.size()
    shares = [*range(1, world), value - sum(range(1, world))]
    local = torch.tensor(shares[rank] if how == "sum" else value - rank, dtype=dtype)
    return DTensor.from_local(local, mesh, [Partial(how)], run_check=False)


def _read():
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, read in READERS.items():
        found[name] = read(_partial(mesh, 7, torch.float64))
        assert found[name] == read(_partial(mesh, 7, torch.float64, "max")), name
    found["index"] = operator.index(_partial(mesh, 7, torch.int64))
    found["list"] = list(range(9))[_partial(mesh, 7, torch.int64)]
    found["false"] = bool(_partial(mesh, 0, torch.float64))
    rows = DTensor.from_local(torch.full((2,), 3.0), mesh, [Partial()], run_check=False)
    found["rows"] = rows.tolist()
    shard = DTensor.from_local(torch.ones(1) * torch.distributed.get_rank(), mesh, [Shard(0)], run_check=False)
    found["sharded"] = shard.tolist()
    found["one"] = DTensor.from_local(
        torch.ones(1 - torch.distributed.get_rank()),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size([1]),
        stride=(1,),
    ).item()
    return found


def test_numbers_are_of_the_whole_tensor():
    expected = {
        **{"item": 7.0, "float": 7.0, "int": 7, "bool": True, "complex": 7 + 0j, "tolist": 7.0, "format": "7.0"},
        **{"index": 7, "list": 7, "false": False, "rows": [6.0, 6.0], "sharded": [0.0, 1.0], "one": 1.0},
    }
    assert run_ranks(2, _read, deadline_s=120) == [expected, expected]


DRAWS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "init": lambda x: nn.init.kaiming_uniform_(x.clone()),
}


def _drawn():
    """What each draw gave on a mesh that shards by one axis and replicates by the other, and after it."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(11)
    found = {}
    for name, draw in DRAWS.items():
        ones = DTensor.from_local(torch.ones(8, 64), mesh, [Shard(0), Replicate()], run_check=False)
        found[name] = draw(ones).to_local().tolist()
    found["next"] = torch.rand(3).tolist()  # every rank's generator went on alike
    return found


def test_shards_draw_their_own_numbers_and_replicas_the_same():
    ranks = run_ranks(4, _drawn, deadline_s=120)
    for name in DRAWS:
        first, replica, second, other = (rank[name] for rank in ranks)
        assert first == replica and second == other, name
        assert first != second, name
    assert all(rank["next"] == ranks[0]["next"] for rank in ranks)


def _own_draws() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    torch.manual_seed(5)
    for rows in (40, 1):
        for places in (Shard(0), Shard(1), Replicate(), Partial()):
            chances = place(torch.ones(rows, 6), mesh, (places,))
            drawn = torch.multinomial(chances, 4)
            found = drawn.full_tensor()
            if drawn.shape != (rows, 4) or found.sort(1).values.diff(dim=1).eq(0).any() or found.max() > 5:
                wrong.append(f"multinomial {rows} {places}")
            if rows > 1 and torch.equal(found[:20], found[20:]):
                wrong.append(f"multinomial drew the same twice {places}")
            leaf = place(-torch.ones(rows, 6), mesh, (places,)).requires_grad_()
            sloped = nn.functional.rrelu(leaf, 0.1, 0.9, training=True)
            sloped.sum().backward()
            slopes = -sloped.detach().full_tensor()
            if not torch.allclose(leaf.grad.full_tensor(), slopes) or slopes.min() < 0.1 or slopes.max() > 0.9:
                wrong.append(f"rrelu {rows} {places}")
            if slopes.unique().numel() < slopes.numel():
                wrong.append(f"rrelu drew the same twice {rows} {places}")
    return [*wrong, str(torch.rand(()))]


def test_rows_that_are_chosen_and_slopes_that_are_drawn_are_each_shards_own():
    found = run_ranks(2, _own_draws, deadline_s=120)
    assert len(found[0]) == 1 and found[0] == found[1]


def _fractional_pools() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    torch.manual_seed(5)
    for shape, pool in (
        ((4, 2, 9, 9), nn.functional.fractional_max_pool2d),
        ((3, 1, 9, 9), nn.functional.fractional_max_pool2d),
        ((2, 9, 9), nn.functional.fractional_max_pool2d),
        ((3, 2, 7, 7, 7), nn.functional.fractional_max_pool3d),
        ((2, 7, 7, 7), nn.functional.fractional_max_pool3d),
    ):
        whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for places in (Replicate(), Shard(0), Shard(1), Shard(len(shape) - 1), Partial()):
            torch.manual_seed(7)
            expected, indices = pool(whole, 2, output_size=3, return_indices=True)
            (slope,) = torch.autograd.grad(expected.square().sum(), whole)
            torch.manual_seed(7)
            leaf = place(whole.detach(), mesh, (places,)).requires_grad_()
            found, positions = pool(leaf, 2, output_size=3, return_indices=True)
            found.square().sum().backward()
            pairs = ((found, expected), (positions, indices), (leaf.grad, slope))
            if not all(torch.allclose(ours.full_tensor(), theirs) for ours, theirs in pairs):
                wrong.append(f"{pool.__name__} {shape} {places}")
    return wrong


def test_fractional_pools_draw_what_one_device_draws():
    assert run_ranks(2, _fractional_pools, deadline_s=120) == [[], []]
