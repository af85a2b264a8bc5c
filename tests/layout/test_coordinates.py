from __future__ import annotations

from holdfast.layout.coordinates import axis_sizes, coordinate_on, key_at, label, own_value, parse_label, varying_axes
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
