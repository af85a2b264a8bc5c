from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings

import holdfast
from holdfast.core.names import key_problem
from holdfast.layout.placement import StridedShard
from holdfast.testing.strategies import arrays, keys, shapes, shardings, states

pytestmark = pytest.mark.slow  # saves of random states


def as_torch(array: np.ndarray) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else torch.empty(0).byte()
    return raw.view(getattr(torch, array.dtype.name)).reshape(array.shape)


@settings(max_examples=40)
@given(states())
def test_any_state_is_saved_and_read_back_to_the_byte(state: dict[str, Any]) -> None:
    tensors = {key: as_torch(array) for key, array in state["tensors"].items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        checkpoint = holdfast.save(Path(folder) / "c", {"tensors": tensors, "value": state["value"]})
        for key, array in state["tensors"].items():
            found = checkpoint.read(key)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        again: dict[str, Any] = {"tensors": {key: torch.zeros_like(t) for key, t in tensors.items()}, "value": None}
        holdfast.load(Path(folder) / "c", again)
        assert repr(again["value"]) == repr(state["value"])


@given(keys())
def test_keys_are_allowed(key: str) -> None:
    assert key_problem(key) is None or not key_problem(key)


def test_the_strange_ones_are_among_them() -> None:
    assert find(shapes(), lambda shape: shape == ()) == ()
    assert 0 in find(shapes(), lambda shape: 0 in shape)
    assert find(arrays(), lambda array: array.dtype.name == "bfloat16" and array.size > 0).size
    strided = find(
        shardings((4, 4)), lambda found: any(isinstance(placement, StridedShard) for placement in found.placements)
    )
    assert strided.sizes
    assert find(shardings((5,)), lambda found: found.flat is not None).flat
