"""Tensors without data: what they record, and what they refuse by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.adapters.hub.hub_statements import components
from holdfast.adapters.hub.traced_tensor import TracedTensor, UntracedOperation


def test_an_operation_that_changes_values_is_refused_by_name() -> None:
    with pytest.raises(UntracedOperation, match="add"):
        TracedTensor.source("a", (2, 2)) + 1


def test_a_cast_is_refused() -> None:
    with pytest.raises(UntracedOperation):
        TracedTensor.source("a", (2, 2)).to(torch.float64)


def test_a_part_that_is_left_out_is_refused() -> None:
    first: Any
    first, _ = torch.chunk(TracedTensor.source("a", (4, 2)), 2)
    with pytest.raises(UntracedOperation, match="left out"):
        components({"b": first.value})


def test_a_tensor_under_two_names_is_refused() -> None:
    value = TracedTensor.source("a", (4, 2)).value
    with pytest.raises(UntracedOperation, match="two names"):
        components({"b": value, "c": value})


def test_a_slice_loses_the_dim_of_its_cut_only() -> None:
    part: Any = torch.chunk(TracedTensor.source("a", (3, 1, 5)), 3)[1].squeeze()
    assert part.value.operation.kind == "unstack" and tuple(part.shape) == (1, 5)
