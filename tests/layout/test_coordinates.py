from __future__ import annotations

from holdfast.layout.coordinates import (
    CoordinateChange,
    axis_sizes,
    coordinate_change,
    coordinate_on,
    key_at,
    label,
    own_value,
    parse_label,
    varying_axes,
)
from holdfast.layout.placement import Mesh

MESH = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))


def test_the_fewest_axes_that_explain_a_value() -> None:
    assert varying_axes(MESH, ["a", "a", "a", "a"]) == ()
    assert varying_axes(MESH, ["a", "a", "b", "b"]) == ("dp",)
    assert varying_axes(MESH, ["a", "b", "a", "b"]) == ("tp",)
    assert varying_axes(MESH, ["a", "b", "b", "a"]) == ("dp", "tp")
    assert varying_axes(MESH, ["a", None, "b", None]) == ("dp",)
    assert varying_axes(MESH, [None] * 4) == ()


def test_coordinates_and_labels() -> None:
    assert coordinate_on(MESH, ("tp",), 2) == (0,)
    assert coordinate_on(MESH, ("rank",), 3) == (3,)
    assert coordinate_on(MESH, ("pp",), 3) is None
    assert axis_sizes(MESH, ("dp", "rank", "pp"), 4) == (2, 4, 0)
    assert parse_label(label(("dp", "tp"), (1, 12))) == (1, 12)
    assert key_at("a.b", "dp=1") == "a.b@dp=1" and key_at("a.b", "") == "a.b"


def test_the_value_of_a_rank_is_that_of_its_coordinate() -> None:
    entry = {"axes": ["tp"], "sizes": [2], "values": {"tp=0": "left", "tp=1": "right"}}
    assert [own_value(MESH, entry, rank, 4) for rank in range(4)] == [("left", "tp=0"), ("right", "tp=1")] * 2
    assert own_value(MESH, {"value": 3}, 1, 4) == (3, "")
    assert own_value(MESH, entry | {"sizes": [4]}, 1, 4) is None
    assert own_value(MESH, entry | {"axes": ["pp"]}, 1, 4) is None
    assert own_value(MESH, entry | {"values": {"tp=0": "left"}}, 1, 4) is None


def test_the_coordinates_that_only_one_of_two_meshes_has() -> None:
    entry = {"axes": ["tp"], "sizes": [3], "values": {"tp=0": 0, "tp=1": 1, "tp=2": 2}}
    assert coordinate_change(MESH, entry, 4) == CoordinateChange(left=("tp=2",))
    one = {"axes": ["tp"], "sizes": [1], "values": {"tp=0": 0}}
    assert coordinate_change(MESH, one, 4) == CoordinateChange(new=("tp=1",))
    other = {"axes": ["pp", "tp"], "sizes": [1, 2], "values": {"pp=0,tp=0": 0, "pp=0,tp=1": 1}}
    assert coordinate_change(Mesh.line(1), other, 1) == CoordinateChange(("pp=0,tp=0", "pp=0,tp=1"), ("rank 0",))
