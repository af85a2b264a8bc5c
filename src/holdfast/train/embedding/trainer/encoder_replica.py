"""An encoder of transformers on data-parallel ranks: opened, sharded by FSDP2 where the layout says so, and called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.embedding_model import EmbeddingModel
from holdfast.train.embedding.micro_batches import row_count
from holdfast.train.embedding.open_model import open_encoder
from holdfast.train.embedding.replica_encoder import EncodedReplica
from holdfast.train.layout import Layout
from holdfast.train.parallel.meshes import Meshes, make_meshes
from holdfast.train.parallel.parallel_model import gradient_sums
from holdfast.train.parallel.replica import Replica


def build_encoder(
    folder: str, config: Any, layout: Layout, device: torch.device | str, *, seed: int, recompute: bool = False
) -> Replica:
    """Open the encoder of a folder in fp32, with this config, and lay it out over the ranks. Collective.

    Weights that the folder lacks and that vectors do not depend on are drawn from `seed`, the same on every rank.
    """
    device = torch.device(device)
    meshes = make_meshes(layout, device, with_experts=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = open_encoder(folder, config).to(device)
    if recompute:
        if not module.supports_gradient_checkpointing:
            raise InvalidArgument(f"train.recompute: {type(module).__name__} of transformers does not support it")
        module.gradient_checkpointing_enable({"use_reentrant": False})
    _shard(module, meshes)
    return Replica(meshes, module.train(), gradient_sums(meshes, module, tied=False), device)


def _shard(module: nn.Module, meshes: Meshes) -> None:
    """Apply FSDP2 to every layer and to the rest; gradients are added up, as everywhere in the trainer."""
    layout, dense = meshes.layout, meshes.dense
    if dense is None or layout.dp_shard == 1:
        return
    mesh = dense["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else dense["dp_shard"]
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    for layer in max(lists, key=len, default=nn.ModuleList()):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


class EncoderOfReplica(EncodedReplica):
    """Makes vectors with an encoder of transformers. Its dropout draws from torch's generator.

    Args:
        replica: The encoder, of `build_encoder`.
        model: Pooling and normalization around it.
        dtype: The dtype of activations, by autocast.
    """

    keyed_dropout = False

    def __init__(self, replica: Replica, model: EmbeddingModel, dtype: torch.dtype) -> None:
        super().__init__(replica)
        self._model = model
        self._dtype = dtype

    def __call__(self, inputs: Any) -> torch.Tensor:
        rounded = self._dtype != torch.float32
        with torch.autocast(self.replica.device.type, self._dtype if rounded else None, enabled=rounded):
            vectors: torch.Tensor = self._model(inputs)
        return vectors

    def check(self, columns: Sequence[Any], *, training: bool) -> None:
        for column in columns:
            row_count(column)
