"""One rank's part of a model in training, whatever computes it: its parameters, gradients, and optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from holdfast.mapping.program import Mapping
from holdfast.train.layout import Layout
from holdfast.train.parallel.clip import clip_gradients, gradient_norm
from holdfast.train.parallel.gradients import GradientSums, finish_gradients
from holdfast.train.parallel.meshes import Meshes
from holdfast.train.parallel.pipeline import Pipeline


class Replica:
    """This rank's part of a model in training; its methods are collective.

    Args:
        meshes: The ranks of the layout.
        module: This rank's part, sharded already.
        gradient_sums: The gradients that FSDP2 does not reduce.
        device: Where it computes.
    """

    def __init__(self, meshes: Meshes, module: nn.Module, gradient_sums: GradientSums, device: torch.device) -> None:
        self.meshes = meshes
        self.module = module
        self.device = device
        self.optimizer: torch.optim.Optimizer | None = None
        self._gradient_sums = gradient_sums

    @property
    def layout(self) -> Layout:
        return self.meshes.layout

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's stages of a pipeline; None without one."""
        return None

    @property
    def mapping(self) -> Mapping | None:
        """The mapping from live to stored tensors, for `holdfast.save` and `Checkpointer`; None if names match."""
        return None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return {key: parameter for key, parameter in self.module.named_parameters() if parameter.requires_grad}

    def make_optimizer(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
        """Create an optimizer over this rank's parameters, with weight decay for matrices but not for vectors.

        The two groups are the same on every layout, so that any layout can load the state of another.
        """
        every = list(self.parameters().values())
        matrices = [p for p in every if p.ndim > 1]
        vectors = [p for p in every if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if self.layout.zero1 and (group := self.meshes.group("dp_replicate")) is not None:
            made: Any = ZeroRedundancyOptimizer(groups, kind, process_group=group, **options)
        else:
            made = kind(groups, **options)
        self.optimizer = made
        return made

    def finish_gradients(self) -> None:
        """Reduce the gradients of this rank's samples to those of the global batch, once after the last backward.

        Gradients that FSDP has reduced already stay as they are; parameters without one get zeros.
        """
        finish_gradients(self.parameters(), self._gradient_sums)

    def gradient_norm(self) -> float:
        """Return the gradient norm over all parameters of all ranks, each element counted once."""
        return gradient_norm(self.parameters(), self.layout.dp * self.layout.tp, self._gradient_sums.copies)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to `max_norm`; returns the norm before clipping."""
        norm = self.gradient_norm()
        clip_gradients(self.parameters(), norm, max_norm)
        return norm
