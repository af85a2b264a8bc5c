"""Optimizers and clipping over parameters of several meshes, and plain ones beside them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.beside import Findings, draw, worst

OPTIMIZERS = {
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=0.05, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=0.05, foreach=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
}
SHAPES = ((7, 5), (3, 5), (2,))  # uneven, and fewer rows than ranks


def _ways():
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    rows, both = (line, [Shard(0)]), (square, [Shard(0), Shard(1)])
    return {
        "one mesh": (rows, rows, rows),
        "two meshes": (rows, both, (square, [Replicate(), Shard(0)])),
        "plain beside": (rows, None, (square, [Shard(0), Replicate()])),
    }


def _parameters(wholes, way):
    return [
        nn.Parameter(item.clone() if place is None else distribute_tensor(item.clone(), *place))
        for item, place in zip(wholes, way, strict=True)
    ]


def _trained(make, parameters):
    optimizer = make(parameters)

    def closure():
        optimizer.zero_grad()
        parts = [(item**2).sum() + item.sin().sum() for item in parameters]
        loss = sum(part.full_tensor() if isinstance(part, DTensor) else part for part in parts)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return parameters


SIXTHS = 6
WAYS = 3  # as many as `_ways` returns


def _optimize(sixth):
    import holdfast.spmd

    holdfast.spmd.enable()
    findings = Findings()
    wholes = [draw(torch.Generator().manual_seed(1), *shape) for shape in SHAPES]
    for name, make in list(OPTIMIZERS.items())[sixth::SIXTHS]:
        expected = _trained(make, _parameters(wholes, (None, None, None)))
        for way, places in _ways().items():
            if name == "LBFGS" and way == "plain beside":
                continue  # it lays all parameters end to end: torch refuses, and says what to do
            findings.check(
                f"{name}, {way}",
                lambda m=make, p=places, e=expected: worst(_trained(m, _parameters(wholes, p)), e),
                0.1 if name == "Muon" else 1e-9,  # Muon rounds to bfloat16
            )
    return findings.count, findings.bad


@pytest.mark.sliced(SIXTHS)
@pytest.mark.parametrize("sixth", range(SIXTHS))
def test_optimizers_step_as_on_one_device(sixth):
    names = list(OPTIMIZERS)[sixth::SIXTHS]
    for count, bad in run_ranks(4, _optimize, sixth, deadline_s=240):
        assert (count, bad) == (len(names) * WAYS - ("LBFGS" in names), {})


def _clipped(parameters, order, foreach):
    for parameter in parameters:
        (parameter**3).sum().backward()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5, order, foreach=foreach)
    gradients = [parameter.grad for parameter in parameters]
    return [norm, nn.utils.get_total_norm(gradients, order, foreach=foreach), *gradients]


def _clip():
    import holdfast.spmd

    holdfast.spmd.enable()
    findings = Findings()
    wholes = [draw(torch.Generator().manual_seed(1), *shape) for shape in SHAPES]
    for order in (0.0, 1.0, 2.0, math.inf):
        for foreach in (None, False, True):
            expected = _clipped(_parameters(wholes, (None, None, None)), order, foreach)
            for way, places in _ways().items():
                findings.check(
                    f"{order} {foreach} {way}",
                    lambda p=places, o=order, f=foreach, e=expected: worst(_clipped(_parameters(wholes, p), o, f), e),
                )
    return findings.count, findings.bad


@pytest.mark.full
def test_clipping_sees_every_gradient_once():
    for count, bad in run_ranks(4, _clip, deadline_s=240):
        assert (count, bad) == (36, {})


def _turned() -> list[str]:
    """Parameters that lie transposed in memory, whose gradients torch lays row by row."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    whole = draw(torch.Generator().manual_seed(3), 6, 4)
    for name in (name for name in OPTIMIZERS if "fused" in name):
        for dim in (0, 1):
            placed = distribute_tensor(whole, mesh, [Shard(1 - dim)]).t().clone()
            parameters = [nn.Parameter(tensor) for tensor in (whole.t().clone(), placed)]
            for parameter in parameters:
                optimizer = OPTIMIZERS[name]([parameter])
                for _ in range(2):
                    optimizer.zero_grad()
                    (parameter.square().sum() + parameter.sin().sum()).backward()
                    optimizer.step()
            if not torch.allclose(parameters[1].full_tensor(), parameters[0]):
                wrong.append(f"{name} {dim}")
    return wrong


def test_fused_steps_of_transposed_parameters():
    assert run_ranks(2, _turned, deadline_s=120) == [[], []]
