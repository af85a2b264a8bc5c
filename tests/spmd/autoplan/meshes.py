"""Meshes without ranks: a plan needs no more than their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended_mesh(*axes: Any) -> Iterator[DeviceMesh]:
    """A mesh of axes given as name, size, name, size; nothing that is sent over it arrives."""
    names, sizes = axes[::2], axes[1::2]
    world = 1
    for size in sizes:
        world *= size
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
