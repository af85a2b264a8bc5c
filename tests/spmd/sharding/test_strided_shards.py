"""Strided shards are redistributed to the rows that torch's own split gives each rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.spmd.base.torch_versions import is_torch_2_11
from tests.dist.harness import run_ranks
from tests.spmd.judge import place

STRIDED = (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2))
TARGETS = (Replicate(), Shard(0), Shard(1), *STRIDED)
SHAPES = [(4, 4), (7, 5)]


def _wrong(shape: tuple[int, int], every: int) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2, 2)), []
    whole = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    sources = [pair for pair in itertools.product((*TARGETS, Partial()), repeat=2) if set(pair) & set(STRIDED)]
    moves = [(now, then) for now in sources for then in itertools.product(TARGETS, repeat=2) if now != then]
    moves += [(then, now) for now, then in moves if not any(p.is_partial() for p in now) and then not in sources]
    for now, then in moves[::every]:
        found = place(whole, mesh, now).redistribute(mesh, then)
        expected = place(whole, mesh, then).to_local()
        if found.to_local().shape != expected.shape or not torch.allclose(found.to_local(), expected):
            wrong.append(f"{now} to {then}")
    return wrong


@pytest.mark.timeout(300)
@pytest.mark.skipif(is_torch_2_11(), reason="torch 2.11 cannot redistribute a strided shard alone")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_gets_its_rows(shape: tuple[int, int], request: pytest.FixtureRequest) -> None:
    every = 1 if request.config.getoption("--full") else 7
    assert run_ranks(4, _wrong, shape, every, deadline_s=280) == [[]] * 4
