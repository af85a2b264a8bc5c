"""Losses as sums, so that their mean over all tokens of a batch is the same on every layout. In fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from holdfast.train.models.config import ModelConfig
from holdfast.train.parallel.collectives import sum_shared

IGNORED = -100


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids [batch, length], and for each position the token that follows; -100 counts for nothing.

    Nor does a sequence of which no token counts: not in the balancing loss either.
    Pipeline stages between first and last need no values: tensors on the meta device will do.
    `keys` [batch] is what dropout draws by (see models.dropout.sample_keys), on every stage.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    keys: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the global batch: token losses, tokens that count, balancing losses, sequences that count."""

    loss_sum: float
    tokens: int
    aux_sum: float
    sequences: int
    aux_weight: float = 0.0

    @property
    def loss(self) -> float:
        """The mean over tokens."""
        return self.loss_sum / max(1, self.tokens)

    @property
    def aux_loss(self) -> float:
        """The mean balancing loss of a sequence, before it is weighted."""
        return self.aux_sum / max(1, self.sequences)

    @property
    def total(self) -> float:
        """What the gradients are of."""
        return self.loss + self.aux_weight * self.aux_loss

    def __add__(self, other: LossSums) -> LossSums:
        sums = (self.loss_sum + other.loss_sum, self.tokens + other.tokens, self.aux_sum + other.aux_sum)
        return LossSums(*sums, self.sequences + other.sequences, self.aux_weight)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Cross entropy summed over the tokens that count. `group`: ranks that each have a slice of the vocabulary."""
    flat, wanted = logits.flatten(0, 1).float(), labels.flatten()
    if group is None:
        return functional.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
    highest = flat.detach().amax(-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    flat = flat - highest
    normaliser = sum_shared(flat.exp().sum(-1), group).log()
    local = wanted - group.rank() * flat.shape[-1]
    here = (local >= 0) & (local < flat.shape[-1])
    picked = flat.gather(-1, local.where(here, 0)[:, None])[:, 0]
    target = sum_shared(picked * here, group)
    return ((normaliser - target) * (wanted != IGNORED)).sum()


def counted_sequences(labels: torch.Tensor) -> torch.Tensor:
    """Which sequences count: those with a token that does."""
    return (labels != IGNORED).any(1)


def balance_sum(chosen: torch.Tensor, config: ModelConfig, length: int) -> torch.Tensor:
    """The load-balancing loss as transformers computes it, of each sequence, summed over sequences.

    Of each sequence and not of the batch: only so it is the same however a batch is divided.
    """
    rows = float(length * config.num_hidden_layers)
    how_often, how_likely = chosen.detach()[:, 0] / rows, chosen[:, 1] / rows
    return config.num_experts * (how_often * how_likely).sum()


class Objective:
    """The loss of one micro batch as a share of the global batch's, and the sums to report.

    Called with the output of the last stage and the labels, as torch's pipeline schedules do.
    """

    def __init__(self, config: ModelConfig, tp_group: dist.ProcessGroup | None) -> None:
        self._config = config
        self._tp_group = tp_group
        self._totals = (torch.ones(()), torch.ones(()))
        self._noted: list[torch.Tensor] = []

    def begin(self, tokens: torch.Tensor, sequences: torch.Tensor) -> None:
        """Start a batch that has so many tokens and sequences on all ranks together."""
        self._totals = (tokens.clamp(min=1), sequences.clamp(min=1))
        self._noted = []

    def __call__(self, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        logits, chosen = output if isinstance(output, tuple) else (output, None)
        loss = token_loss_sum(logits, labels, self._tp_group)
        aux = torch.zeros_like(loss)
        if chosen is not None:
            aux = balance_sum(chosen * counted_sequences(labels)[:, None, None], self._config, labels.shape[1])
        self._noted.append(torch.stack((loss, aux)).detach())
        tokens, sequences = self._totals
        return loss / tokens + (self._config.router_aux_loss_coef / sequences) * aux

    def sums(self) -> torch.Tensor:
        """Token losses and balancing losses of this rank's micro batches, in double precision."""
        return torch.stack(self._noted).double().sum(0)
