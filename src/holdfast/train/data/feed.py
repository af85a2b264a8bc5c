"""Micro batches for every rank: read where they are needed, once per tensor group, and sent to its other ranks."""

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
from holdfast.train.model_replica import Trainee

Shares = Sequence[NDArray[np.int64]]


class Feed:
    """Reads a dataset for one trainee. `reads` tells whether this rank is one that opens the data at all."""

    def __init__(self, dataset: Dataset, trainee: Trainee, sequence: int) -> None:
        self._dataset = dataset
        self._trainee = trainee
        self._sequence = sequence
        self._group = trainee.meshes.group("tp")
        self._needs = trainee.needs_inputs or trainee.needs_labels
        self.reads = self._needs and trainee.meshes.at("tp") == 0

    def micro_batches(self, shares: Shares) -> list[MicroBatch]:
        """This rank's micro batches: of real tokens where a stage needs them, of none between."""
        if not self._needs:
            empty = [torch.empty(len(share), self._sequence, dtype=torch.int64, device="meta") for share in shares]
            return [MicroBatch(tokens, tokens) for tokens in empty]
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        batch = broadcast_batch(lambda: self._read(shares), self._group, source, self._trainee.device)
        return [MicroBatch(tokens[:, :-1], labels) for tokens, labels in zip(*batch, strict=True)]

    def _read(self, shares: Shares) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tokens and labels by micro batch; a sample numbered -1 fills up a batch and counts for nothing."""
        tokens = torch.from_numpy(self._dataset.read(np.maximum(np.concatenate(shares), 0)))
        self._check(tokens)
        labels = tokens[:, 1:].clone()
        labels[torch.from_numpy(np.concatenate(shares) < 0)] = IGNORED
        ends = np.cumsum([len(share) for share in shares])
        rows = [slice(end - len(share), end) for share, end in zip(shares, ends, strict=True)]
        return [tokens[these] for these in rows], [labels[these] for these in rows]

    def _check(self, tokens: torch.Tensor) -> None:
        """A token that no word of the vocabulary has would be an error on one rank, and a silent zero on several."""
        known, highest = self._trainee.config.vocab_size, int(tokens.max())
        if highest >= known or int(tokens.min()) < 0:
            raise InvalidArgument(
                f"{self._dataset.name} has the token {highest}, and model.vocab_size={known} goes up to {known - 1}: "
                "give the model a larger vocabulary, or check data.path and data.dtype"
            )
