"""Along the sharded dim itself: a few numbers per row are sent in place of the rows, and the results are the same."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.spmd.base import torch_versions
from tests.dist.harness import run_ranks
from tests.spmd.judge import Listener, place

RANKS, ROWS, LONG, UNEVEN = 4, 64, 4096, 4093  # torch takes a gather of shorter rows for cheaper than a reduction


def _layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


# each with the numbers per row that a rank may receive, forward and backward together
CALLS = {
    "layer_norm": (_layer_norm, 6),
    "var": (lambda x: x.var(1), 6),
    "std_mean": (lambda x: torch.std_mean(x, -1, correction=3), 8),
    "var_full": (lambda x: x.var(), 1),
    "max": (lambda x: tuple(x.max(1)), 6),
    "min": (lambda x: tuple(x.round().min(-1, keepdim=True)), 6),
    "cumsum": (lambda x: x.cumsum(-1), 6),
    "topk": (lambda x: tuple(x.topk(3, 1)), 18),
    "topk_smallest": (lambda x: tuple(x.topk(2, -1, largest=False)), 12),
}
if torch_versions.is_torch_2_11():  # whose dispatcher would not know the flips of its gradient: gathered
    CALLS.pop("cumsum")
GATHERED = (RANKS - 1) * LONG // RANKS  # numbers per row


def _backward(outputs, x):
    live = [output for output in outputs if output.requires_grad]
    if not live:
        return []
    generator = torch.Generator().manual_seed(3)
    slopes = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in live]
    placed = [
        place(slope, output.device_mesh, output.placements) if isinstance(output, DTensor) else slope
        for slope, output in zip(slopes, live, strict=True)
    ]
    return list(torch.autograd.grad(live, [x], placed))


def _results(call, x):
    outputs = call(x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    return [*outputs, *_backward(outputs, x)]


def _whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _measured():
    """For each call and length of the sharded dim: the bytes received, and how far the results are off."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {}
    for name, (call, _) in CALLS.items():
        for length in (LONG, UNEVEN):
            x = torch.randn(ROWS, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            expected = _results(call, x.clone().requires_grad_())
            sharded = place(x, mesh, (Shard(1),)).detach().requires_grad_()
            with Listener() as heard:
                ours = _results(call, sharded)
            found[name, length] = heard.bytes, _gap(ours, expected)
    return found


def _gap(ours, expected):
    pairs = [(_whole(own).detach(), theirs.detach()) for own, theirs in zip(ours, expected, strict=True)]
    assert all(own.dtype == theirs.dtype and own.shape == theirs.shape for own, theirs in pairs)
    return max((own.nan_to_num(7e3) - theirs.nan_to_num(7e3)).abs().max().item() for own, theirs in pairs)


def _cornered():
    """How far results are off where a rank has nothing, shards of shards differ, and values are NaN or equal."""
    import holdfast.spmd

    holdfast.spmd.enable()
    lines, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    found = {}
    for mesh, places in ((lines, (Shard(1),)), (square, (Shard(1), Shard(1))), (square, (Shard(0), Shard(1)))):
        for length in (9, 41):
            x = torch.randn(6, length, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            x[1, length - 1] = x[2, 1] = x[2, length // 2] = torch.nan
            x[3] = x[3].round() if length > 9 else 1.0
            for name, (call, _) in CALLS.items():
                if "topk" not in name:  # which of equals it takes is promised by no device
                    expected = _results(call, x.clone().requires_grad_())
                    ours = _results(call, place(x, mesh, places).detach().requires_grad_())
                    found[name, length, str(places)] = _gap(ours, expected)
    return found


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ranks_with_nothing_shards_of_shards_and_nan():
    for rank in run_ranks(RANKS, _cornered, deadline_s=300):
        assert {case: gap for case, gap in rank.items() if not gap < 1e-8} == {}


@cache
def _found():
    return run_ranks(RANKS, _measured, deadline_s=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("length", [LONG, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", CALLS)
def test_a_few_numbers_per_row_are_sent(name, length):
    numbers = CALLS[name][1]
    assert numbers < GATHERED
    for rank in _found():
        received, gap = rank[name, length]
        assert received <= math.ceil(numbers * ROWS * 8)
        assert gap < 1e-10
