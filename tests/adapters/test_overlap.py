"""Memory that overlaps: found exactly, and never filled with what it cannot hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.overlap import address_range, array_overlaps, tensor_overlaps


def test_overlap_is_what_counting_addresses_finds() -> None:
    sizes, strides = (1, 2, 3), (0, 1, 2, 3, 4, 5, 7)
    for shape in itertools.product(sizes, repeat=3):
        for steps in itertools.product(strides, repeat=3):
            tensor = torch.empty(50).as_strided(shape, steps)
            places = {sum(a * b for a, b in zip(index, steps, strict=True)) for index in np.ndindex(*shape)}
            assert tensor_overlaps(tensor) == (len(places) < tensor.numel()), (shape, steps)


def test_overlap_of_arrays_counts_bytes() -> None:
    memory = np.zeros(40, np.uint8)
    for step in range(1, 9):
        array = np.ndarray((4,), np.int32, memory, strides=(step,))
        assert array_overlaps(array) == (step < 4), step
    assert array_overlaps(np.broadcast_to(np.ones(1), (3,))) and not array_overlaps(np.broadcast_to(np.ones(3), (1, 3)))
    assert not array_overlaps(np.arange(9)[::-2]) and not array_overlaps(np.zeros((0, 3))[:, ::2])


def test_addresses_of_a_view() -> None:
    base = torch.zeros(10, dtype=torch.float64)
    begin = base.data_ptr()
    assert address_range(base[2:8:2]) == (begin + 16, begin + 56)
    assert address_range(base[:0]) == (0, 0)


def ema(model: nn.Module) -> holdfast.EMA:
    average = holdfast.EMA(model, 0.5)
    average._averages["weight"] = torch.zeros(1, 3).expand(3, 3)
    return average


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made.state[model.weight]["momentum_buffer"] = torch.zeros(3, 1).expand(3, 3)
    return made


def linear() -> Any:
    return nn.Linear(3, 3, bias=False)


def with_weight(weight: torch.Tensor) -> nn.Module:
    model = linear()
    model.weight = nn.Parameter(weight)
    return model


def saved_state() -> dict[str, Any]:
    model = linear()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    own.step()
    tree = {"t": torch.arange(9.0).view(3, 3), "a": np.arange(9.0).reshape(3, 3)}
    return {"model": model, "optimizer": own, "ema": holdfast.EMA(model, 0.5), "tree": tree}


@pytest.mark.parametrize(
    ("live", "named"),
    [
        ({"model": lambda m: with_weight(torch.zeros(1, 3).expand(3, 3))}, "model: weight"),
        ({"model": lambda m: with_weight(torch.zeros(20).as_strided((3, 3), (2, 1)))}, "model: weight"),
        ({"model": lambda m: m, "optimizer": optimizer}, "optimizer: weight/momentum_buffer"),
        ({"model": lambda m: m, "ema": ema}, "ema/model: weight"),
        ({"tree": lambda m: {"t": torch.zeros(3, 1).expand(3, 3), "a": np.zeros((3, 3))}}, "tree: t"),
        ({"tree": lambda m: {"t": torch.zeros(3, 3), "a": np.broadcast_to(np.zeros(3), (3, 3))}}, r"tree\.a"),
    ],
)
def test_memory_that_overlaps_itself_is_refused_before_anything_is_touched(
    tmp_path: Path, live: dict[str, Any], named: str
) -> None:
    holdfast.save(tmp_path / "x", saved_state())
    model = linear()
    state = {name: make(model) for name, make in live.items()}
    before = model.weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(holdfast.LayoutError, match=rf"{named}: several elements of the live .* share memory"):
            holdfast.load(tmp_path / "x", state, strict=strict)
    assert torch.equal(model.weight, before)


def test_an_expanded_tensor_that_is_left_out_is_no_obstacle(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"tree": {"t": torch.ones(3, 3), "u": torch.ones(2)}})
    live = {"t": torch.zeros(1, 3).expand(3, 3), "u": torch.zeros(2)}
    holdfast.load(tmp_path / "x", {"tree": live}, ignore=["tree/t"])
    array: dict[str, Any] = {"t": np.broadcast_to(np.zeros(3, np.float32), (3, 3)), "u": torch.zeros(2)}
    holdfast.load(tmp_path / "x", {"tree": array}, ignore=["tree/t"])
    assert array["u"].tolist() == [1, 1] and not array["t"].any()
    assert live["u"].tolist() == [1, 1] and not live["t"].any()


def test_dims_of_one_and_steps_without_overlap_are_filled(tmp_path: Path) -> None:
    saved = {"row": torch.arange(3.0).view(1, 3), "steps": torch.arange(6.0).view(2, 3)}
    holdfast.save(tmp_path / "x", {"tree": saved})
    live = {"row": torch.zeros(3).expand(1, 3), "steps": torch.zeros(8).as_strided((2, 3), (3, 2))}
    holdfast.load(tmp_path / "x", {"tree": live})
    assert all(torch.equal(live[key], saved[key]) for key in saved)
