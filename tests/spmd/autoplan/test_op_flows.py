"""A flow is true: the operator on the shards gives the shards of the operator on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from holdfast.spmd.autoplan.recording import record
from holdfast.spmd.autoplan.units import PARTIAL, WHOLE

PARTS = 2


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


IDS = torch.tensor([[1, 5, 2, 7], [0, 3, 3, 6]])
CHOSEN = torch.tensor([[[0, 1], [2, 3]], [[3, 1], [0, 2]]])
# What is called, on what, and how many flows its rule has to find.
CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], int]] = {
    "linear": (F.linear, [_r(2, 4, 6), _r(8, 6)], 4),
    "linear with bias": (F.linear, [_r(2, 4, 6), _r(8, 6), _r(8)], 4),
    "mm": (torch.mm, [_r(4, 6), _r(6, 8)], 3),
    "bmm": (torch.bmm, [_r(2, 4, 6), _r(2, 6, 8)], 4),
    "addmm": (torch.addmm, [_r(8), _r(4, 6), _r(6, 8)], 2),
    "attention": (F.scaled_dot_product_attention, [_r(2, 4, 6, 8), _r(2, 4, 6, 8), _r(2, 4, 6, 8)], 2),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [_r(2, 4, 6), _r(6)], 2),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [_r(2, 4, 6), _r(6), _r(6)], 2),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [_r(2, 4, 6), _r(4), _r(4)], 1),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [_r(2, 4, 6, 6), _r(8, 4, 3, 3), _r(8)], 2),
    "conv without bias": (F.conv2d, [_r(2, 4, 6, 6), _r(8, 4, 3, 3)], 3),
    "max_pool": (lambda x: F.max_pool2d(x, 2), [_r(2, 4, 6, 6)], 2),
    "broadcast": (torch.add, [_r(2, 4, 6), _r(4, 1)], 3),
    "gelu": (F.gelu, [_r(2, 4)], 2),
    "flatten": (lambda x: x.flatten(1), [_r(2, 4, 6)], 2),
    "unflatten": (lambda x: x.unflatten(1, (-1, 3)), [_r(2, 12)], 2),
    "unsqueeze": (lambda x: x.unsqueeze(1), [_r(2, 4)], 2),
    "transpose": (lambda x: x.transpose(0, 2), [_r(2, 4, 6)], 3),
    "permute": (lambda x: x.permute(2, 0, 1), [_r(2, 4, 6)], 3),
    "expand": (lambda x: x.expand(-1, 5), [_r(4, 1)], 1),
    "slice": (lambda x: x[:, 1:3], [_r(2, 4, 6)], 2),
    "select": (lambda x: x[:, 1], [_r(2, 4, 6)], 2),
    "chunk": (lambda x: x.chunk(2, dim=-1), [_r(2, 4, 6)], 2),
    "cat": (lambda x, y: torch.cat((x, y), dim=-1), [_r(2, 4), _r(2, 6)], 1),
    "stack": (lambda x, y: torch.stack((x, y), dim=1), [_r(2, 4), _r(2, 4)], 2),
    "softmax": (lambda x: x.softmax(-1), [_r(2, 4, 6)], 2),
    "sum": (lambda x: x.sum(1), [_r(2, 4, 6)], 3),
    "sum of all": (torch.sum, [_r(2, 4)], 2),
    "mean": (lambda x: x.mean((1,), keepdim=True), [_r(2, 4, 6)], 2),
    "topk": (lambda x: x.topk(2, dim=-1), [_r(2, 4, 6)], 2),
    "scatter": (lambda x, chosen: x.scatter(-1, chosen, 1.0), [_r(2, 2, 4), CHOSEN], 2),
    "embedding": (F.embedding, [IDS, _r(8, 6)], 4),
}


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


def _listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("case", CASES)
def test_the_shards_of_a_flow_make_the_whole(case: str) -> None:
    function, tensors, count = CASES[case]
    (step,) = record(_Calls(function), tensors).steps
    assert len(step.flows) == count
    order = [tensors[(1, 0)[place]] for place in range(2)] if case == "embedding" else tensors  # table first
    for flow in step.flows:
        if case == "embedding" and flow.outputs == (PARTIAL,):
            continue  # the ids of other ranks' rows are masked by DTensor itself
        parts = []
        for part in range(PARTS):
            own = [
                tensor if place == WHOLE else tensor.chunk(PARTS, place)[part]
                for tensor, place in zip(order, flow.inputs, strict=True)
            ]
            is_added = PARTIAL in flow.outputs and len(own) > 2 and part > 0
            own = [*own[:2], torch.zeros_like(own[2])] if is_added else own  # a bias counts on one rank
            parts.append(_listed(function(*(reversed(own) if case == "embedding" else own))))
        for number, (whole, place) in enumerate(zip(_listed(function(*tensors)), flow.outputs, strict=False)):
            made = [part[number] for part in parts]
            got = sum(made) if place == PARTIAL else torch.cat(made, place)
            torch.testing.assert_close(got, whole, msg=lambda text, flow=flow: f"{flow}: {text}")


def test_what_is_not_known_has_no_flows() -> None:
    (step,) = record(_Calls(torch.linalg.svdvals), [_r(4, 4)]).steps[-1:]
    assert step.flows == ()
