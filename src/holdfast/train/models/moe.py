"""The sparse feed-forward: a router sends each token to a few experts; one expert may serve all."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from holdfast.train.models.config import ModelConfig
from holdfast.train.models.layers import Linear, SwiGLU
from holdfast.train.parallel.experts import Experts


class SparseMoe(nn.Module):
    """Gives the output and, for each sequence, how often experts were chosen and how likely they were.

    The sums are [batch, 2, experts], in fp32; they are what the balancing loss is made of.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.shared_expert: SwiGLU | None = None
        if config.traits.shared_expert:
            self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        likely = functional.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(likely, self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.experts(x, chosen, weights.to(x.dtype))
        if self.shared_expert is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out, _sums(likely, chosen)


def _sums(likely: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros_like(likely).scatter(-1, chosen, 1.0)
    return torch.stack((counts, likely), dim=2).sum(1)
