"""Tensors that are computed from others: what is read for them, and what is kept in memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from safetensors.torch import save_file

from holdfast.convert.computed import ComputedTensors
from holdfast.layout.box import Box
from holdfast.sources import open_source


def test_tensors_that_are_read_apart_from_a_band_are_not_kept(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    recipe = source.contents.groups["model"].tensors["a"]
    computed = ComputedTensors(source)
    found = computed.read(recipe, Box.full((2, 3)))
    assert found.view("f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    gone = weakref.ref(found)
    del found
    assert gone() is None
