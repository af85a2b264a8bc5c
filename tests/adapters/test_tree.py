from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.adapters.tree import contains_tensor, flatten, unflatten
from holdfast.core.errors import Unsupported
from holdfast.plan.state_references import references


def test_tensors_and_arrays_leave_and_come_back() -> None:
    value = {"a": [torch.ones(2), {"b": np.arange(3)}], "n": (1, None), 5: torch.zeros(1)}
    tree = flatten("name", value)
    assert sorted(tree.tensors) == ["5", "a.0", "a.1.b"]
    assert references(tree.value) == {"5": "$tensor", "a.0": "$tensor", "a.1.b": "$array"}
    again = unflatten(tree.value, tree.tensors, "name")
    assert torch.equal(again["a"][0], torch.ones(2)) and again["a"][1]["b"].tolist() == [0, 1, 2]
    assert again["n"] == (1, None) and torch.equal(again[5], torch.zeros(1))
    assert contains_tensor(value) and not contains_tensor({"a": [1, (2,)]})


def test_two_paths_with_one_key_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"the key 'a\.b'"):
        flatten("name", {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_arrays_without_a_dtype_of_the_format_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"name\.x: a numpy array of dtype object"):
        flatten("name", {"x": np.array([object()])})
