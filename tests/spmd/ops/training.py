"""Optimizers, clipping and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.spmd.table import Table

TABLE = Table("training")


def _steps(name: str, **options: Any) -> Callable[..., Any]:
    """Three steps of an optimizer on two parameters; returns the parameters."""

    def run(x: Any, y: Any) -> Any:
        parameters = [torch.nn.Parameter(value.detach().clone()) for value in (x, y)]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **options)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum((parameter**2).sum() + parameter.sin().sum() for parameter in parameters)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return tuple(parameter.detach() for parameter in parameters)

    return run


LOSSES = {"n": "6", "m": "6"}  # two numbers a step, which the closure adds up
for _name in "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD".split():
    for _how, _options in (("plain", {"foreach": False}), ("foreach", {"foreach": True})):
        _sums = {} if (_name, _how) == ("Rprop", "foreach") else LOSSES  # which torch refuses: it is gathered
        TABLE.add(f"{_name}_{_how}", _steps(_name, **_options), "nm", "nm", grad=False, reduced=_sums)
for _name in "SGD Adam AdamW Adagrad".split():
    TABLE.add(f"{_name}_fused", _steps(_name, fused=True), "nm", "nm", grad=False, reduced=LOSSES)
TABLE.add("SGD_momentum", _steps("SGD", momentum=0.9, nesterov=True), "nm", "nm", grad=False, reduced=LOSSES)
TABLE.add("Adafactor", _steps("Adafactor"), "nm", "nm", grad=False)
TABLE.add("Muon", _steps("Muon"), "nm", "nm", grad=False, partial=False, tolerance=0.1)  # bfloat16
TABLE.add("LBFGS", _steps("LBFGS"), "nm", "nm", grad=False)


def _clipped(order: float, **options: Any) -> Callable[..., Any]:
    def run(x: Any, y: Any) -> Any:
        parameters = [torch.nn.Parameter(value.detach().clone()) for value in (x, y)]
        for parameter in parameters:
            (parameter**3).sum().backward()
        total = torch.nn.utils.clip_grad_norm_(parameters, 0.5, order, **options)
        return (total, *(parameter.grad for parameter in parameters))

    return run


for _order in (1.0, 2.0, float("inf")):
    for _each in (False, True):
        TABLE.add(f"clip_grad_norm_{_order}_{_each}", _clipped(_order, foreach=_each), "nm", "nm", grad=False)


def _clip_value(x: Any) -> Any:
    parameter = torch.nn.Parameter(x.detach().clone())
    (parameter**3).sum().backward()
    torch.nn.utils.clip_grad_value_([parameter], 0.1)
    return parameter.grad


TABLE.add("clip_grad_value_", _clip_value, "nm", grad=False)

# Random numbers: what is compared is what the draw must have in common with one device, never the numbers.
R = {"grad": False, "random": True}
TABLE.add("rand_like", torch.rand_like, "nm", **R)
TABLE.add("randn_like", torch.randn_like, "nm", **R)
TABLE.add("dropout", lambda x: F.dropout(torch.ones_like(x) * torch.rand_like(x), 0.0001), "nm", **R)
TABLE.add("uniform_", lambda x: x.clone().uniform_(), "nm", **R)
TABLE.add("normal_", lambda x: x.clone().normal_(), "nm", **R)
TABLE.add("exponential_", lambda x: x.clone().exponential_(), "nm", **R)
TABLE.add("poisson", lambda x: torch.poisson(x * 1e6), "positive:nm", **R)
TABLE.add("random_", lambda x: x.clone().random_(), "nm", **R)
TABLE.add("bernoulli", lambda x: torch.bernoulli(x) * torch.rand_like(x), "unit:nm", **R)
TABLE.add("xavier_", lambda x: torch.nn.init.xavier_uniform_(x.clone()), "nm", **R)
TABLE.add("trunc_normal_", lambda x: torch.nn.init.trunc_normal_(x.clone()), "nm", **R)
