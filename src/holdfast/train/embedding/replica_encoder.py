"""Embeddings of the trainer's model on any layout: a `ModelReplica` without a head, and a pooling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.micro_batches import MASK, row_count
from holdfast.train.parallel.model_replica import ModelReplica
from holdfast.train.parallel.replica import Replica

IDS, DROPOUT_KEYS = "input_ids", "dropout_keys"


class EncodedReplica(ABC):
    """Encodes texts with a model laid out over ranks, for `GradCache`. Creating one is collective."""

    keyed_dropout: bool

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.group = replica.meshes.data_group()  # the ranks that share a batch

    @abstractmethod
    def __call__(self, inputs: Any) -> torch.Tensor:
        """Return the embeddings of some rows."""

    @abstractmethod
    def check(self, columns: Sequence[Any], *, training: bool) -> None:
        """Raise InvalidArgument for inputs that cannot be encoded."""


class ReplicaEncoder(EncodedReplica):
    """Encodes texts with the trainer's model, for `GradCache`. Creating one is collective.

    A column of inputs is token ids [rows, length], or a dict of tensors with `input_ids` and, if rows are padded,
    `attention_mask`. Padding follows the tokens. `dropout_keys` [rows] determine dropout, as
    `models.dropout.sample_keys` returns them; without them nothing is dropped. The ranks of one pipeline and of one
    tensor group need the same columns; each data-parallel rank has rows of its own. Experts are trained without their
    balancing loss.

    Args:
        replica: A model of `parallel_model.build(..., head=False)`.
        pool: Called with the hidden states [rows, length, hidden] of some rows and their inputs; returns their
            embeddings [rows, dim]. It is a function: parameters of its own would not be trained.
        causal: False for attention in both directions, over the tokens of the mask.
    """

    replica: ModelReplica
    keyed_dropout = True  # it follows from `dropout_keys`, and not from the order of the rows

    def __init__(
        self, replica: ModelReplica, pool: Callable[[torch.Tensor, Any], torch.Tensor], *, causal: bool = True
    ) -> None:
        if any(key.startswith("lm_head.") for key in replica.parameters()):
            raise InvalidArgument("the model has a head, which embeddings do not train: build it with head=False")
        super().__init__(replica)
        self._pool = pool
        self._causal = causal

    def __call__(self, inputs: Any) -> torch.Tensor:
        """Return the embeddings of some rows; without a pipeline."""
        ids, options = self.stage_inputs(inputs)
        hidden, _ = split_output(self.replica.module(ids, **options))
        return self.embed(hidden, inputs)

    def stage_inputs(self, inputs: Any, rows: int = 0, length: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the token ids for the first stage and the keywords of every stage, padded to at least these sizes.

        More tokens follow a row, where no other token attends to them. More rows repeat the first one.
        """
        ids, keys = token_ids(inputs), _get(inputs, DROPOUT_KEYS)
        tp = self.replica.layout.tp
        columns = -(-max(length, ids.shape[1]) // tp) * tp - ids.shape[1]
        options = {} if keys is None else {"keys": keys}
        if not self._causal:
            mask = _get(inputs, MASK)
            visible = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            options["visible"] = functional.pad(visible, (0, columns))
        padded = {"ids": functional.pad(ids, (0, columns)), **options}
        more = {name: _more_rows(values, rows).to(self.replica.device) for name, values in padded.items()}
        return more.pop("ids"), more

    def embed(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Return the embeddings from the hidden states of `stage_inputs`, without those that it has added."""
        rows, length = token_ids(inputs).shape
        return self._pool(hidden[:rows, :length], inputs)

    def check(self, columns: Sequence[Any], *, training: bool) -> None:
        """Raise InvalidArgument for inputs without token ids, padding before tokens, and missing dropout keys."""
        for number, column in enumerate(columns):
            ids, mask = token_ids(column), _get(column, MASK)
            row_count(column)
            if ids.dim() != 2 or ids.is_floating_point():
                raise InvalidArgument(
                    f"{IDS!r} of column {number} are {ids.dtype} {list(ids.shape)}; expected integers [rows, length]"
                )
            if mask is not None and not _follows(mask):
                raise InvalidArgument(f"column {number} has padding before a token, or a row without tokens: pad right")
        have = {_get(column, DROPOUT_KEYS) is not None for column in columns}
        if len(have) > 1:
            raise InvalidArgument(f"some columns have {DROPOUT_KEYS!r} and others have none: give all of them or none")
        if training and self.replica.config.drops and have == {False}:
            raise InvalidArgument(
                f"the model has dropout but the columns have no {DROPOUT_KEYS!r}, so dropout would have no effect: "
                "take them from models.dropout.sample_keys, or set the model's dropout to 0"
            )


def token_ids(inputs: Any) -> torch.Tensor:
    ids = _get(inputs, IDS) if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, torch.Tensor):
        raise InvalidArgument(
            f"a column needs token ids: a tensor, or a dict of tensors with {IDS!r}; not a {type(inputs).__name__}"
        )
    return ids


def _follows(mask: torch.Tensor) -> bool:
    """True if every row has tokens, and padding after them only."""
    used = mask.bool().long()
    return bool((used.diff(dim=1) <= 0).all() & (used[:, 0] == 1).all())


def split_output(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the hidden states of a decoder, and the sums of its routers if it has experts."""
    return output if isinstance(output, tuple) else (output, None)


def _get(inputs: Any, name: str) -> torch.Tensor | None:
    return inputs.get(name) if isinstance(inputs, Mapping) else None


def _more_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    extra = rows - values.shape[0]
    return torch.cat((values, values[:1].expand(extra, *values.shape[1:]))) if extra > 0 else values
