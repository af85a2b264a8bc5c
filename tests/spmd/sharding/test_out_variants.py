"""Calls with `out=`: the numbers of one device, in a tensor that keeps its placements, whatever was called before."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.dist.harness import run_ranks

PLACES = (Replicate(), Shard(0), Shard(1), Partial())
CALLS = {
    "add": lambda x, **out: torch.add(x, 2.0, **out),
    "mul": lambda x, **out: torch.mul(x, 3.0, **out),
    "exp": torch.exp,
    "mm": lambda x, **out: torch.mm(x, x, **out),
    "cumsum": lambda x, **out: torch.cumsum(x, 0, **out),
    "amax": lambda x, **out: torch.amax(x, 0, keepdim=True, **out),
    "sum": lambda x, **out: torch.sum(x, 0, keepdim=True, **out),
    "sort": lambda x, **out: torch.sort(x, 0, **out),
    "max": lambda x, **out: torch.max(x, 0, keepdim=True, **out),
    "median": lambda x, **out: torch.median(x, 1, keepdim=True, **out),
}


def _placed(whole, mesh, place):
    if place.is_partial():
        return DTensor.from_local(whole / mesh.size(), mesh, [place])
    return distribute_tensor(whole.clone(), mesh, [place])


def _wrong_results(rows):
    """Return the calls whose result, or input, or placements of `out`, are not as they must be."""
    import torch.distributed as dist

    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (dist.get_world_size(),)), []
    whole = torch.randn(rows, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, call in CALLS.items():
        expected = call(whole)
        expected = (expected,) if isinstance(expected, torch.Tensor) else tuple(expected)
        for here in PLACES:
            for there in PLACES[:3]:
                x = _placed(whole, mesh, here)
                outs = tuple(distribute_tensor(torch.zeros_like(result), mesh, [there]) for result in expected)
                call(x, out=outs[0] if len(outs) == 1 else outs)
                same = all(
                    torch.allclose(*pair) for pair in zip((o.full_tensor() for o in outs), expected, strict=True)
                )
                kept = x.placements == (here,) and all(out.placements == (there,) for out in outs)
                if not same or not kept or not torch.allclose(x.full_tensor(), whole):
                    wrong.append(f"{name} {here} into {there}")
    return wrong


@pytest.mark.sliced(3)
@pytest.mark.parametrize(("ranks", "rows"), [(3, 5), (2, 1), (2, 4)])
def test_out_has_the_numbers_of_one_device(ranks, rows):
    assert run_ranks(ranks, _wrong_results, rows, deadline_s=120) == [[]] * ranks


def _collectives():
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (4,))
    rows, weight = torch.arange(6.0).reshape(3, 2), distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])
    a, b, out = (distribute_tensor(rows, mesh, [Shard(0)]) for _ in range(3))
    with CommDebugMode() as without:
        torch.add(a, b)
        torch.mm(a, weight)
    with CommDebugMode() as sent:
        torch.add(a, b, out=out)
        torch.mm(a, weight, out=out)
    return sent.get_total_counts() - without.get_total_counts()


def test_out_placed_as_the_result_sends_nothing():
    assert run_ranks(4, _collectives, deadline_s=60) == [0] * 4


def _refusals():
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), []
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    for out in (torch.zeros(4, 3), torch.zeros(0), torch.zeros(4, 2, dtype=torch.int64)):
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as raised:
            torch.exp(x, out=distribute_tensor(out, mesh, [Replicate()]))
        found.append(str(raised.value).partition(", from")[0])
    small = distribute_tensor(torch.tensor([[256.0], [1.0]]).bfloat16(), mesh, [Replicate()])
    total = distribute_tensor(torch.zeros(1), mesh, [Replicate()])
    torch.sum(small, 0, out=total)
    return found, total.item()


def test_out_of_another_shape_or_dtype():
    shape = "aten.exp.out would change the shape of the DTensor given as out"
    dtype = "aten.exp.out: result type torch.float32 can't be cast to the desired output type torch.int64"
    assert torch.tensor(257.0).bfloat16() == 256  # a sum is rounded to the dtype of out only
    assert run_ranks(2, _refusals, deadline_s=60) == [([shape, shape, dtype], 257.0)] * 2
