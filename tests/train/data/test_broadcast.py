"""Nested batches arrive as they were read, in two collectives, and failures arrive too."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.train.data.broadcast import broadcast_batch, decode, encode
from tests.dist.harness import run_ranks


def nested() -> dict[Any, Any]:
    return {
        "tokens": torch.arange(12).reshape(3, 4),
        "mask": torch.tensor([[True, False, True]]),
        "parts": [torch.randn(2, 3, dtype=torch.bfloat16), (torch.ones(5, dtype=torch.int8), None, "text")],
        "nothing": {"empty": torch.empty(0, 7, dtype=torch.float16), "none": None, "list": [], "tuple": ()},
        "tensor": {"tensor": ["int64", [3]], "dict": "no container"},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        7: [1, 2.5, True, float("inf"), 'Tang "\u00e9\u6d77\0'],
        "complex": torch.tensor([1 + 2j]),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and type(one) is type(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_a_nested_batch_survives():
    batch = nested()
    assert same(decode(encode(batch)), batch)


@pytest.mark.parametrize("batch", [None, [], {}, "x", 3, torch.empty(0), torch.tensor(1, dtype=torch.uint8)])
def test_small_ones_too(batch: Any):
    assert same(decode(encode(batch)), batch)


Pair = namedtuple("Pair", "a b")


def test_what_cannot_travel_is_named():
    for batch, where in [
        ({"a": [1, {2}]}, r"batch\['a'\]\[1\] is a set"),
        ({"a": np.zeros(3)}, "ndarray"),
        ([Pair(1, 2)], "Pair"),
        ({(1, 2): 3}, "dict"),
        ([torch.eye(2).to_sparse()], "Tensor"),
    ]:
        with pytest.raises(holdfast.Unsupported, match=where):
            encode(batch)


def _broadcast() -> tuple[bool, int]:
    torch.manual_seed(0)
    expected = nested()
    calls: list[int] = []
    original = dist.broadcast

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*arguments, **options)

    dist.broadcast = counted
    try:
        batch = broadcast_batch(lambda: _only_on(1, expected), dist.group.WORLD, source=1)
    finally:
        dist.broadcast = original
    return same(batch, expected), len(calls)


def _only_on(rank: int, batch: Any) -> Any:
    assert dist.get_rank() == rank, "only the source reads"
    return batch


def test_one_rank_reads_and_all_have_it_in_two_collectives():
    assert run_ranks(3, _broadcast, deadline_s=60) == [(True, 2)] * 3


def _failing() -> list[str]:
    said = []
    for trouble in (holdfast.NotFound("no such file"), ValueError("odd")):
        try:
            broadcast_batch(partial(_raise, trouble), dist.group.WORLD, source=0)
        except (holdfast.HoldfastError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _raise(error: Exception) -> None:
    raise error


def test_a_reader_that_fails_fails_everywhere_and_nobody_waits():
    first, second = run_ranks(2, _failing, deadline_s=60)
    assert first == ["NotFound: no such file", "ValueError: odd"]
    assert second == [
        "NotFound: rank 0 could not read its batch: no such file",
        "PeerFailed: rank 0 could not read its batch: ValueError: odd",
    ]
