"""The sparse feed-forward: a router sends each token to a few experts; a shared expert may process all tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from holdfast.train.models.experts import Experts
from holdfast.train.models.mixed_precision_layers import Linear, SwiGLU
from holdfast.train.models.model_config import ModelConfig


class SparseMoe(nn.Module):
    """Returns the output and, per sequence, the counts and summed probabilities of the experts.

    These sums are [batch, 2, experts], in fp32; the balancing loss is computed from them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.shared_expert: SwiGLU | None = None
        if config.traits.shared_expert:
            self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = functional.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.experts(x, chosen, weights.to(x.dtype))
        if self.shared_expert is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out, _sums(probabilities, chosen)


def _sums(probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
    return torch.stack((counts, probabilities), dim=2).sum(1)
