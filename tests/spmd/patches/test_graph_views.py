"""A compiled graph that ends in a view of a DTensor, as a graph break after the view makes it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks

VIEWS = {
    "columns": lambda x: x[:, 2:4],
    "transposed": lambda x: x.t(),
    "unsqueezed": lambda x: x.unsqueeze(0),
    "split": lambda x: x.view(x.shape[0], 2, 3),
    "chunks": lambda x: x.split(3, dim=1)[1],
}
PLACES = {"rows": Shard(0), "replicas": Replicate(), "partial": Partial()}


def _of_input(view, x):
    y = view(x)
    torch._dynamo.graph_break()
    return (y * y).sum() + x.sum()


def _of_intermediate(view, x):
    h = x * 2
    y = view(h)
    torch._dynamo.graph_break()
    return (y * y).sum() + h.sum()


def _placed(whole, mesh, place):
    if place.is_partial():
        return DTensor.from_local(whole / 2, mesh, [place], run_check=False).detach()
    return distribute_tensor(whole, mesh, [place])


def _gaps(rows, names):
    """Return the calls whose result or gradient differs from one device's."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    whole = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for title, place in PLACES.items():
        for name in names:
            view = VIEWS[name]
            for call in (_of_input, _of_intermediate):
                torch._dynamo.reset()
                one, leaf = whole.clone().requires_grad_(), _placed(whole, mesh, place).requires_grad_()
                expected = call(view, one)
                expected.backward()
                found = torch.compile(call, backend="aot_eager")(view, leaf)
                found.backward()
                pairs = [(found, expected), (leaf.grad, one.grad)]
                if not all(torch.allclose(a.full_tensor(), b) for a, b in pairs):
                    wrong.append(f"{title} {name} {call.__name__}")
    return wrong


def test_it_is_right_and_has_its_gradient():
    assert run_ranks(2, _gaps, 5, ["columns"], deadline_s=120) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("rows", [4, 5, 1])
def test_every_view_is_right(rows):
    assert run_ranks(2, _gaps, rows, list(VIEWS), deadline_s=300) == [[], []]


def _written():
    """Return what a write into the returned view leaves in the tensor that was viewed."""
    import holdfast.spmd

    holdfast.spmd.enable()
    x = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    view = torch.compile(lambda x: x[:, 2:4], backend="aot_eager")(x)
    view.add_(1)
    return x.full_tensor().tolist()


def test_a_write_into_it_is_seen_in_the_tensor():
    expected = torch.zeros(4, 6)
    expected[:, 2:4] = 1
    assert run_ranks(2, _written, deadline_s=100) == [expected.tolist()] * 2
