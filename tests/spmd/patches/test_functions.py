"""Functions of torch.nn.functional that are put before torch's own while the rules are on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import holdfast.spmd


def test_plain_tensors_go_torchs_way_and_disable_restores_the_functions():
    before = F.instance_norm, F.pad
    x = torch.randn(2, 3, 4, 4)
    expected = F.instance_norm(x), F.pad(x, (1, 1, 1, 1), mode="circular"), F.pad(x, (1, 1))
    holdfast.spmd.enable()
    try:
        assert (F.instance_norm, F.pad) != before
        found = F.instance_norm(x), F.pad(x, (1, 1, 1, 1), mode="circular"), F.pad(x, (1, 1))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    finally:
        holdfast.spmd.disable()
    assert (F.instance_norm, F.pad) == before
