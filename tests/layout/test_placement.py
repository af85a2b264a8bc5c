"""Placements against torch's own arithmetic."""

from __future__ import annotations

import pytest
import torch.distributed.tensor.placement_types as torch_placements
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from holdfast.layout.placement import Mesh, Replicate, Shard, StridedShard, shard_boxes
from holdfast.testing.strategies import shapes, shardings


def to_torch(placement: object) -> torch_placements.Placement:
    if isinstance(placement, StridedShard):
        return torch_placements._StridedShard(placement.dim, split_factor=placement.split_factor)
    return torch_placements.Shard(placement.dim) if isinstance(placement, Shard) else torch_placements.Replicate()


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_left_to_right_is_what_dtensor_computes(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    sharding = data.draw(shardings(shape).filter(lambda found: found.flat is None))
    theirs = [to_torch(placement) for placement in sharding.placements]
    for coordinate in sharding.coordinates:
        parts = shard_boxes(shape, sharding.sizes, sharding.placements, coordinate, right_to_left=False)
        size, offset = _compute_local_shape_and_global_offset(shape, sharding.sizes, list(coordinate), theirs)
        if not parts:
            assert 0 in size
            continue
        assert size == tuple(max(part.local.stops[dim] for part in parts) for dim in range(len(shape)))
        assert offset == tuple(min(part.box.offsets[dim] for part in parts) for dim in range(len(shape)))


def test_very_uneven_strided_shards_differ_between_the_two_readings() -> None:
    """9 rows, tensor parallel 2, FSDP 4: FSDP2 leaves the last rank of the first half without rows."""
    placements = (StridedShard(0, 2), Shard(0))
    assert shard_boxes((9,), (4, 2), placements, (3, 0)) == ()
    (part,) = shard_boxes((9,), (4, 2), placements, (3, 0), right_to_left=False)
    assert part.box.offsets == (8,)


def test_a_split_factor_of_its_own_interleaves() -> None:
    parts = shard_boxes((8,), (2,), (StridedShard(0, 2),), (1,))
    assert [(part.box.offsets, part.box.sizes, part.local.offsets) for part in parts] == [
        ((2,), (2,), (0,)),
        ((6,), (2,), (2,)),
    ]
    assert len(shard_boxes((8,), (2,), (Replicate(),), (1,))) == 1


def test_mesh_coordinates_are_row_major() -> None:
    mesh = Mesh(("dp", "tp"), (2, 3), (10, 11, 12, 13, 14, 15))
    assert [mesh.coordinate(rank) for rank in (10, 12, 13, 15)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert mesh.coordinate(0) is None
    with pytest.raises(ValueError, match="cannot hold 3 ranks"):
        Mesh(("dp",), (2,), (0, 1, 2))
