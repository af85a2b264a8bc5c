"""The meshes of a layout: one for dense parameters, and one in which experts use data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.train.layout import Layout

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "expert_replicate", "expert_shard", "expert")


@dataclass(frozen=True, slots=True)
class Meshes:
    """The dense and the expert mesh, with the same rank order; both None for a single rank.

    The axis `expert` spans `ep` data-parallel ranks and their tensor groups.
    """

    layout: Layout
    dense: DeviceMesh | None
    experts: DeviceMesh | None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group along an axis; None if the axis has a single rank."""
        mesh = self.dense if axis in AXES else self.experts
        if mesh is None or mesh[axis].size() == 1:
            return None
        return mesh.get_group(axis)

    def data_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks with this rank's part of the model, by `dp_rank`; None for a single rank.

        Collective: creates the group if it spans both data-parallel axes.
        """
        if self.dense is None or 1 in (self.layout.dp_replicate, self.layout.dp_shard):
            return self.group("dp_shard") or self.group("dp_replicate")
        own = None
        for ranks in self.dense.mesh.permute(0, 3, 1, 2).flatten(0, 1).flatten(1).tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own = group
        return own

    def at(self, axis: str) -> int:
        """Return this rank's coordinate along an axis."""
        mesh = self.dense if axis in AXES else self.experts
        return 0 if mesh is None else mesh.get_local_rank(axis)

    @property
    def dp_rank(self) -> int:
        return self.at("dp_replicate") * self.layout.dp_shard + self.at("dp_shard")


def make_meshes(layout: Layout, device: torch.device, *, with_experts: bool) -> Meshes:
    """Create the meshes of a layout. Collective; a single process needs no process group."""
    if layout.world == 1:
        return Meshes(layout, None, None)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    dense = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    experts = None
    if with_experts and layout.expert_ranks > 1:
        sizes = (layout.pp, layout.expert_replicate, layout.expert_shard, layout.expert_ranks)
        experts = init_device_mesh(device.type, sizes, mesh_dim_names=EXPERT_AXES)
    return Meshes(layout, dense, experts)
