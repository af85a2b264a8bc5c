"""The loss of a global batch as fp32 sums, the same on every layout: token losses and load balancing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from holdfast.train.collectives import sum_shared
from holdfast.train.models.model_config import ModelConfig

IGNORED = -100


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids [batch, length], and the next token for each position; -100 is ignored.

    A sequence without any counted token is ignored in the balancing loss as well. Pipeline stages between
    the first and the last accept tensors on the meta device. `keys` [batch] determine dropout on every stage
    (see models.dropout.sample_keys).
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    keys: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the global batch: token losses, counted tokens, balancing losses, counted sequences."""

    loss_sum: float
    tokens: int
    aux_sum: float
    sequences: int
    aux_weight: float = 0.0

    @property
    def loss(self) -> float:
        """The mean loss per token."""
        return self.loss_sum / max(1, self.tokens)

    @property
    def aux_loss(self) -> float:
        """The mean balancing loss per sequence, unweighted."""
        return self.aux_sum / max(1, self.sequences)

    @property
    def total(self) -> float:
        """The loss that is differentiated."""
        return self.loss + self.aux_weight * self.aux_loss

    def __add__(self, other: LossSums) -> LossSums:
        sums = (self.loss_sum + other.loss_sum, self.tokens + other.tokens, self.aux_sum + other.aux_sum)
        return LossSums(*sums, self.sequences + other.sequences, self.aux_weight)


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the cross entropy summed over counted tokens; the ranks of `group` each hold a vocabulary shard."""
    flat, wanted = logits.flatten(0, 1).float(), labels.flatten()
    if group is None:
        return functional.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
    highest = flat.detach().amax(-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    flat = flat - highest
    normalizer = sum_shared(flat.exp().sum(-1), group).log()
    local = wanted - group.rank() * flat.shape[-1]
    here = (local >= 0) & (local < flat.shape[-1])
    picked = flat.gather(-1, local.where(here, 0)[:, None])[:, 0]
    target = sum_shared(picked * here, group)
    return ((normalizer - target) * (wanted != IGNORED)).sum()


def counted_sequences(labels: torch.Tensor) -> torch.Tensor:
    """Return a mask of the sequences with at least one counted token."""
    return (labels != IGNORED).any(1)


def balance_sum(chosen: torch.Tensor, config: ModelConfig, length: int) -> torch.Tensor:
    """Return the load-balancing loss of transformers, computed per sequence and summed over sequences.

    Per sequence instead of per batch, so that the loss does not depend on how a batch is divided.
    """
    rows = float(length * config.num_hidden_layers)
    frequency, probability = chosen.detach()[:, 0] / rows, chosen[:, 1] / rows
    return config.num_experts * (frequency * probability).sum()


class Objective:
    """The contribution of one micro batch to the loss of the global batch, and the sums to report.

    Called with the output of the last stage and the labels, as torch's pipeline schedules do.
    """

    def __init__(self, config: ModelConfig, tp_group: dist.ProcessGroup | None) -> None:
        self._config = config
        self._tp_group = tp_group
        self._totals = (torch.ones(()), torch.ones(()))
        self._recorded: list[torch.Tensor] = []

    def begin(self, tokens: torch.Tensor, sequences: torch.Tensor) -> None:
        """Start a global batch with these total numbers of tokens and sequences over all ranks."""
        self._totals = (tokens.clamp(min=1), sequences.clamp(min=1))
        self._recorded = []

    def __call__(self, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        logits, chosen = output if isinstance(output, tuple) else (output, None)
        loss = token_loss_sum(logits, labels, self._tp_group)
        aux = torch.zeros_like(loss)
        if chosen is not None:
            aux = balance_sum(chosen * counted_sequences(labels)[:, None, None], self._config, labels.shape[1])
        self._recorded.append(torch.stack((loss, aux)).detach())
        tokens, sequences = self._totals
        return loss / tokens + (self._config.router_aux_loss_coef / sequences) * aux

    def sums(self) -> torch.Tensor:
        """Return the sums of token losses and balancing losses of this rank's micro batches, in float64."""
        return torch.stack(self._recorded).double().sum(0)
