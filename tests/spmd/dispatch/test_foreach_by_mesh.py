"""`torch._foreach_*` over tensors of several meshes, and what is made of them: nothing is gathered."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.dist.harness import run_ranks
from tests.spmd.beside import Findings, draw, worst

SHAPES = ((8, 4), (7, 5), (8, 2), (3,))
CALLS = {
    "add_ of lists": lambda x: torch._foreach_add_(x, [item * 2 for item in x], alpha=0.5),
    "mul by numbers": lambda x: torch._foreach_mul(x, [1.0, 2.0, 3.0, 4.0]),
    "mul by a tensor": lambda x: torch._foreach_mul(x, torch.tensor(3.0, dtype=torch.float64)),
    "lerp_": lambda x: torch._foreach_lerp_(x, [item.cos() for item in x], 0.3),
    "addcmul_": lambda x: torch._foreach_addcmul_(x, [item.cos() for item in x], [item.sin() for item in x], 0.1),
    "norm": torch._foreach_norm,
    "neg": torch._foreach_neg,
    "copy_": lambda x: torch._foreach_copy_(x, [item.exp() for item in x]),
    "zero_": torch._foreach_zero_,
}


def _placed(wholes):
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    places = (
        (line, [Shard(0)]),
        (square, [Shard(0), Shard(1)]),
        (line, [Replicate()]),
        (square["a"], [Shard(0)]),
    )
    return [distribute_tensor(whole.clone(), *place) for whole, place in zip(wholes, places, strict=True)]


def _wholes():
    return [draw(torch.Generator().manual_seed(2), *shape) for shape in SHAPES]


def _results(call, tensors):
    found = call(tensors)
    return list(found if found is not None else tensors)


def _lists():
    import holdfast.spmd

    holdfast.spmd.enable()
    findings, sent = Findings(), {}
    for name, call in CALLS.items():
        expected = _results(call, _wholes())
        placed = _placed(_wholes())
        with CommDebugMode() as listening:
            found = _results(call, placed)
        sent[name] = listening.get_total_counts()
        findings.check(name, lambda f=found, e=expected: worst(f, e))
    return findings.count, findings.bad, {name: count for name, count in sent.items() if count}


def test_lists_of_two_meshes_are_split_by_mesh():
    for count, bad, sent in run_ranks(4, _lists, deadline_s=120):
        assert (count, bad, sent) == (len(CALLS), {}, {})


class _Two(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def _averaged(tensors):
    model = _Two(tensors)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with CommDebugMode() as listening:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            averaged.update_parameters(model)
    return listening.get_total_counts(), list(averaged.module.parameters())


def _average():
    import holdfast.spmd

    holdfast.spmd.enable()
    plain = draw(torch.Generator().manual_seed(5), 2, 2)
    _, expected = _averaged([*_wholes(), plain.clone()])
    sent, found = _averaged([*_placed(_wholes()), plain.clone()])
    whole = [item.full_tensor() if isinstance(item, DTensor) else item for item in found]
    return sent, max(float((a - b).abs().max()) for a, b in zip(whole, expected, strict=True))


def test_an_averaged_model_on_two_meshes_sends_nothing():
    for sent, gap in run_ranks(4, _average, deadline_s=120):
        assert sent == 0
        assert gap < 1e-12
