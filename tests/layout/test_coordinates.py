from __future__ import annotations

from holdfast.layout.coordinates import axis_sizes, coordinate_on, key_at, label, parse_label, varying_axes
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
