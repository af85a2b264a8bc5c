"""Writes into a Partial through its aliases: views, .data and .detach() see them, and are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.judge import place


def _edited(edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(y: Any) -> Any:
        edit(y)
        return y

    return run


def _set(y: Any, key: Any, value: Any = 5.0) -> None:
    y[key] = value


def _seen_by_a_view(y: Any) -> Any:
    view = y[1:3]
    y.add_(1.0)
    return view


EDITS: dict[str, Callable[[Any], Any]] = {
    "data.clamp_": _edited(lambda y: y.data.clamp_(3, 9)),
    "data.add_": _edited(lambda y: y.data.add_(1.0)),
    "data.add_ tensor": _edited(lambda y: y.data.add_(_whole_beside(y), alpha=0.5)),
    "data.masked_fill_": _edited(lambda y: y.data.masked_fill_(y.detach() > 4, 0.0)),
    "data[0]": _edited(lambda y: _set(y.data, 0)),
    "data[mask]": _edited(lambda y: _set(y.data, y.detach() > 4)),
    "detach().pow_": _edited(lambda y: y.detach().pow_(2)),
    "y[0][1]": _edited(lambda y: _set(y[0], 1)),
    "y[1:][0][1]": _edited(lambda y: _set(y[1:][0], 1)),
    "y[0][1:3]": _edited(lambda y: _set(y[0], slice(1, 3))),
    "t()[0]": _edited(lambda y: _set(y.t(), 0)),
    "view(-1)[1:3]": _edited(lambda y: _set(y.view(-1), slice(1, 3))),
    "view(-1).clamp_": _edited(lambda y: y.view(-1).clamp_(3, 9)),
    "foreach": _edited(lambda y: torch._foreach_clamp_min_([y.data], 3.0)),
    "uniform_": _edited(lambda y: y.data.uniform_(2.0, 2.0)),
    "a view reads": _seen_by_a_view,
}


def _whole_beside(y: Any) -> Any:
    numbers = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    return (
        distribute_tensor(numbers, y.device_mesh, [Replicate()] * y.device_mesh.ndim)
        if isinstance(y, DTensor)
        else numbers
    )


def _wrong() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    found = []
    for shape, places in (((4,), (Partial(),)), ((2, 2), (Partial(), Partial())), ((2, 2), (Shard(0), Partial()))):
        mesh = init_device_mesh("cpu", shape)
        for name, edit in EDITS.items():
            whole = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
            ours = edit(place(whole, mesh, places)).full_tensor()
            if not torch.allclose(ours, edit(whole)):
                found.append(f"{name} {places}: {ours}")
    return found


def test_what_is_written_through_an_alias_of_a_partial_is_there():
    assert run_ranks(4, _wrong, deadline_s=240) == [[]] * 4


def _kinds() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), []
    for how in ("sum", "avg", "max", "min", "product"):
        y = DTensor.from_local(torch.full((3,), 2.0), mesh, [Partial(how)], run_check=False)
        y.clamp_(max=1.5)
        y[1] = 7.0
        if y.full_tensor().tolist() != [1.5, 7.0, 1.5] or y.placements != (Partial(how),):
            found.append(f"{how}: {y.full_tensor()}, {y.placements}")
    return found


def test_every_kind_of_partial_stays_what_it_is():
    assert run_ranks(2, _kinds, deadline_s=120) == [[], []]


def _log_probabilities() -> list[str]:
    """As PPO and DPO take them, of a vocabulary that is sharded; and a loss whose targets are plain."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), []
    scores = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(5)
    results = []
    for x in (scores.clone(), distribute_tensor(scores, mesh, [Shard(1)]), distribute_tensor(scores, mesh, [Shard(0)])):
        x.requires_grad_()
        chosen = x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        ratio = (chosen - chosen.detach()).exp()
        loss = -torch.min(ratio * 2, ratio.clamp(0.8, 1.2) * 2).mean() + (chosen * chosen).sum()
        loss = loss + F.cross_entropy(x, ids) + nn.NLLLoss()(x.log_softmax(-1), ids)
        loss.backward()
        results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (loss.detach(), x.grad)])
    for name, ours in zip(("classes", "rows"), results[1:], strict=True):
        if not all(torch.allclose(one, other) for one, other in zip(ours, results[0], strict=True)):
            found.append(name)
    return found


def test_log_probabilities_of_a_sharded_vocabulary_and_plain_targets():
    assert run_ranks(2, _log_probabilities, deadline_s=120) == [[], []]
