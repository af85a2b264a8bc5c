"""Modules that are built alike share a role."""

from __future__ import annotations

from torch import nn

from holdfast.spmd.autoplan.roles import roles_of


def test_alike_neighbours_are_one_role_and_others_keep_their_numbers() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    mixed = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(4, 8))
    roles = roles_of(nn.ModuleDict({"layers": layers, "mixed": mixed}))
    assert roles["layers.0.0"] == roles["layers.2.0"] == "layers.*.0"
    assert roles["mixed.0"] == roles["mixed.4"] == "mixed.[0,3-4]"
    assert roles["mixed.2"] == "mixed.2"


def test_an_alternating_model_has_two_roles() -> None:
    blocks = nn.ModuleList([nn.Linear(4, 4 + number % 2) for number in range(4)])
    assert list(dict.fromkeys(roles_of(blocks).values())) == ["", "[0,2]", "[1,3]"]
