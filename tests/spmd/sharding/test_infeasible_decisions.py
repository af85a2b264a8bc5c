"""Decisions that torch makes and cannot carry out are told from those that it can."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.spmd.base import torch_versions
from holdfast.spmd.sharding.infeasible_decisions import is_infeasible

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _before_2_13(monkeypatch):
    monkeypatch.setattr(torch_versions, "AT_LEAST_2_13", False)


def _spec(place):
    return DTensorSpec(None, (place,))


def _asked(op, before, after, result):
    """Whether a call on `before`, moved to `after`, with this result, is refused."""
    info = SimpleNamespace(schema=SimpleNamespace(args_schema=before))
    wanted = None if after == before else SimpleNamespace(args_schema=after)
    return is_infeasible(OutputSharding(result, wanted, wanted is not None), op, info)


def test_a_decision_that_moves_nothing_stands():
    shard = _spec(Shard(0))
    assert not _asked(ATEN.clamp_min_.default, (shard, 0), (shard, 0), shard)
    assert not _asked(ATEN.exp.default, (shard,), (shard,), shard)


def test_what_is_only_read_may_move():
    shard, whole = _spec(Shard(0)), _spec(Replicate())
    assert not _asked(ATEN.exp.default, (shard,), (whole,), whole)
    assert not _asked(ATEN.add_.Tensor, (whole, shard), (whole, whole), whole)


def test_shards_are_not_made_into_parts():
    shard, part = _spec(Shard(0)), _spec(Partial())
    assert _asked(ATEN.mm.default, (shard, part), (part, part), part)
    assert not _asked(ATEN.mm.default, (_spec(Replicate()), part), (part, part), part)


def test_a_written_tensor_stays_where_it_is():
    shard, whole = _spec(Shard(0)), _spec(Replicate())
    assert _asked(ATEN.clamp_min_.default, (shard, 0), (whole, 0), whole)
    assert _asked(ATEN.clamp_min_.default, (shard, 0), (shard, 0), whole)
    assert not _asked(ATEN.squeeze_.dim, (shard, 0), (shard, 0), whole)  # it changes its shape, and its places with it


def test_a_written_tensor_of_a_list_stays_where_it_is():
    shard, whole = _spec(Shard(0)), _spec(Replicate())
    before, after = ([whole, shard], 2.0), ([whole, whole], 2.0)
    assert _asked(ATEN._foreach_mul_.Scalar, before, after, None)
    assert not _asked(ATEN._foreach_mul_.Scalar, before, before, None)


def test_torch_2_13_moves_what_is_written_but_makes_no_parts(monkeypatch):
    monkeypatch.setattr(torch_versions, "AT_LEAST_2_13", True)
    shard, whole, part = _spec(Shard(0)), _spec(Replicate()), _spec(Partial())
    assert not _asked(ATEN.clamp_min_.default, (shard, 0), (whole, 0), whole)
    assert _asked(ATEN.cat.default, ([shard, part],), ([part, part],), part)


def test_torch_2_11_leaves_no_strided_shard_alone(monkeypatch):
    monkeypatch.setattr(torch_versions, "is_torch_2_11", lambda: True)
    strided = _StridedShard(0, split_factor=2)
    both = DTensorSpec(None, (strided, Shard(0)))
    alone, elsewhere = DTensorSpec(None, (strided, Replicate())), DTensorSpec(None, (strided, Shard(1)))
    assert not _asked(ATEN.exp.default, (both,), (both,), both)
    assert _asked(ATEN.cumsum.default, (both, 0), (alone, 0), alone)
    assert _asked(ATEN.t.default, (both,), (both,), elsewhere)
    assert not _asked(ATEN.exp.default, (alone,), (alone,), alone)
