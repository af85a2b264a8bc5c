"""Micro batches for every rank: read once per tensor-parallel group, token ids checked, broadcast in the group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument
from holdfast.train.data.broadcast import broadcast_batch
from holdfast.train.data.datasets import Dataset
from holdfast.train.loss import IGNORED, MicroBatch
from holdfast.train.parallel.model_replica import ModelReplica

Shares = Sequence[NDArray[np.int64]]


class Feed:
    """Reads a dataset for one model replica. `reads` is True if this rank reads the data itself."""

    def __init__(self, dataset: Dataset, replica: ModelReplica, sequence: int) -> None:
        self._dataset = dataset
        self._replica = replica
        self._sequence = sequence
        self._group = replica.meshes.group("tp")
        self._needs = replica.needs_inputs or replica.needs_labels
        self.reads = self._needs and replica.meshes.at("tp") == 0

    def micro_batches(self, shares: Shares) -> list[MicroBatch]:
        """Return this rank's micro batches; tensors on the meta device for stages that need no tokens."""
        if not self._needs:
            empty = [torch.empty(len(share), self._sequence, dtype=torch.int64, device="meta") for share in shares]
            return [MicroBatch(tokens, tokens) for tokens in empty]
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        batch = broadcast_batch(lambda: self._read(shares), self._group, source, self._replica.device)
        return [MicroBatch(tokens[:, :-1], labels) for tokens, labels in zip(*batch, strict=True)]

    def _read(self, shares: Shares) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return tokens and labels by micro batch; a sample of index -1 is padding and is ignored in the loss."""
        tokens = torch.from_numpy(self._dataset.read(np.maximum(np.concatenate(shares), 0)))
        self._check(tokens)
        labels = tokens[:, 1:].clone()
        labels[torch.from_numpy(np.concatenate(shares) < 0)] = IGNORED
        ends = np.cumsum([len(share) for share in shares])
        rows = [slice(end - len(share), end) for share, end in zip(shares, ends, strict=True)]
        return [tokens[these] for these in rows], [labels[these] for these in rows]

    def _check(self, tokens: torch.Tensor) -> None:
        """Check token ids: out of range, they raise on one device but silently become zero when sharded."""
        known, highest = self._replica.config.vocab_size, int(tokens.max())
        if highest >= known or int(tokens.min()) < 0:
            raise InvalidArgument(
                f"{self._dataset.name} has the token {highest}, but model.vocab_size={known} allows at most "
                f"{known - 1}: increase model.vocab_size, or check data.path and data.dtype"
            )
