"""Ranks have the same elements before and after a reshape if the descriptions agree."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.spmd.sharding.local_elements import local_elements

SHAPES = [(24,), (4, 6), (6, 4), (2, 12), (2, 3, 4), (4, 3, 2), (3, 8), (30,), (5, 6), (2, 15), (3, 2, 5)]


def _mesh(*sizes: int) -> Any:
    return SimpleNamespace(size=lambda axis: sizes[axis], shape=sizes)


def _flat(shape: tuple[int, ...], mesh: Any, placements: tuple[Placement, ...], at: tuple[int, ...]) -> list[int]:
    """Return the elements of one rank, in its order, by cutting a tensor of their numbers as torch does."""
    part = torch.arange(math.prod(shape)).reshape(shape)
    for axis, place in enumerate(placements):
        if not place.is_replicate():
            part = place._split_tensor(part, mesh.size(axis), with_padding=False)[0][at[axis]]  # type: ignore[attr-defined]
    return part.reshape(-1).tolist()  # type: ignore[no-any-return]


def _placements(dims: int, axes: int) -> list[tuple[Placement, ...]]:
    one: list[Placement] = [Replicate()]
    for dim in range(dims):
        one += [Shard(dim), _StridedShard(dim, split_factor=2), _StridedShard(dim, split_factor=3)]
    return list(itertools.product(one, repeat=axes))


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
def test_descriptions_agree_only_for_the_same_elements(sizes: tuple[int, ...]) -> None:
    mesh, kinds = _mesh(*sizes), {}
    for shape in SHAPES:
        for placements in _placements(len(shape), len(sizes)):
            found = local_elements(shape, mesh, placements)
            if found is not None:
                ranks = itertools.product(*(range(size) for size in sizes))
                elements = [_flat(shape, mesh, placements, at) for at in ranks]
                known = kinds.setdefault((math.prod(shape), str(found)), elements)
                assert known == elements, (shape, placements)
    assert len(kinds) > 20


def test_even_shards_have_one_description() -> None:
    mesh = _mesh(2, 2)
    placed = local_elements((4, 6), mesh, (Shard(0), Shard(1)))
    assert placed == local_elements((24,), mesh, (Shard(0), _StridedShard(0, split_factor=2)))
    assert placed == local_elements((2, 2, 6), mesh, (Shard(0), Shard(2)))
    assert placed != local_elements((24,), mesh, (Shard(0), Shard(0)))


def test_what_is_not_a_row_of_digits_has_no_description() -> None:
    assert local_elements((5, 6), _mesh(2, 2), (Shard(0), Shard(0))) is None
    assert local_elements((10,), _mesh(2), (_StridedShard(0, split_factor=3),)) is None
