from __future__ import annotations

import pytest

from holdfast.layout.mesh import Mesh


def test_mesh_coordinates_are_row_major() -> None:
    mesh = Mesh(("dp", "tp"), (2, 3), (10, 11, 12, 13, 14, 15))
    assert [mesh.coordinate(rank) for rank in (10, 12, 13, 15)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert mesh.coordinate(0) is None
    with pytest.raises(ValueError, match="cannot hold 3 ranks"):
        Mesh(("dp",), (2,), (0, 1, 2))
