"""Plans: as good as the plan written by hand, the same on every rank, and the same training."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from tests.dist.harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from holdfast.core.errors import InvalidArgument
from holdfast.spmd.auto import Plan, _measure, distribute, plan


class Layer(nn.Module):
    """A transformer layer as trainers write it."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm1(x)
        parts = [part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(64, 32), Layer(), Layer(), nn.Linear(32, 64)).double()


HAND = {"*": "rows"}
HAND |= {f"*.{name}": "rows" for name in ("query", "key", "value", "up")} | {"*.out": "columns", "*.down": "columns"}


def _planned():
    import holdfast.spmd

    torch.set_num_threads(1)
    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    ids = torch.arange(16).reshape(2, 8)
    found = plan(_model, mesh, [ids])
    by_hand = _measure(_model(), mesh, HAND, [ids])
    expected = _model()(ids)
    placed = distribute(_model(), mesh, Plan.from_dict(json.loads(json.dumps(found.to_dict()))))
    got = placed(distribute_tensor(ids, mesh, [Replicate()])).full_tensor()
    return found.to_dict(), by_hand, bool(torch.allclose(got, expected)), sum(p.nbytes for p in _model().parameters())


def test_the_plan_of_a_transformer_moves_no_more_than_the_one_by_hand():
    first, second = run_ranks(2, _planned, deadline_s=280)
    assert first == second
    found, by_hand, is_right, whole_bytes = first
    assert is_right
    assert found["moved_bytes"] <= by_hand
    assert found["held_bytes"] < 0.6 * whole_bytes
    assert len(found["why"]) == len(found["choices"]) and "it would be" in found["why"][0]


def test_what_is_no_plan_is_refused():
    with pytest.raises(InvalidArgument, match="no plan"):
        Plan.from_dict({"choices": {"layers.*": "sideways"}})
