"""The decoder and its blocks: whole, a pipeline stage with the keys of the whole model, or without a head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdfast.train.collectives import gather_shared, sum_shared
from holdfast.train.models.attention import Attention, Rotation, rotation
from holdfast.train.models.dropout import NO_DROPOUT, Dropout, DropoutGrids, attention_grid, feature_grid
from holdfast.train.models.mixed_precision_layers import Linear, RMSNorm, SwiGLU
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.models.sparse_mlp import SparseMoe
from holdfast.train.models.stored_config import StoredConfig

TIES = {"lm_head.weight": "model.embed_tokens.weight"}


class DecoderBlock(nn.Module):
    """One layer: attention and feed-forward, each with pre-norm and a residual connection."""

    def __init__(self, config: ModelConfig, layer: int, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.self_attn = Attention(config, layer)
        self.mlp = SparseMoe(config) if config.traits.experts else SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.after_attention = Dropout(config.residual_dropout, f"layers/{layer}/after attention")
        self.after_mlp = Dropout(config.residual_dropout, f"layers/{layer}/after mlp")

    def forward(
        self, x: torch.Tensor, by: Rotation, grids: DropoutGrids, visible: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output, and the sums of its router if it has one. `visible` is that of `Attention`."""
        if self.recompute and torch.is_grad_enabled():
            out: tuple[torch.Tensor, torch.Tensor | None] = checkpoint(
                self._forward, x, by, grids, visible, use_reentrant=False
            )
            return out
        return self._forward(x, by, grids, visible)

    def _forward(
        self, x: torch.Tensor, by: Rotation, grids: DropoutGrids, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended = self.self_attn(self.input_layernorm(x), by, grids.attention, visible=visible)
        x = x + self.after_attention(attended, grids.features)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, SparseMoe):
            out, sums = self.mlp(normed)
            return x + self.after_mlp(out, grids.features), sums
        return x + self.after_mlp(self.mlp(normed), grids.features), None


class Body(nn.Module):
    """The `model` submodule of Hugging Face: embedding, layers by number, final norm."""

    config: StoredConfig  # of a decoder without a head

    def __init__(self, config: ModelConfig, layers: Iterable[int], *, first: bool, last: bool, recompute: bool) -> None:
        super().__init__()
        if first:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(number): DecoderBlock(config, number, recompute=recompute) for number in layers}
        )
        if last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Maps token ids on the first stage, or hidden states on later stages, to hidden states or logits.

    With experts, the sums of the routers are passed along with the hidden states, so that the last
    stage has the balance over all layers. Without a head, the last stage returns the normed hidden states
    of whole sequences.
    """

    _tied_weights_keys = TIES

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[int] | None = None,
        *,
        first: bool = True,
        last: bool = True,
        recompute: bool = False,
        compute_dtype: torch.dtype = torch.float32,
        head: bool = True,
    ) -> None:
        super().__init__()
        self.config = StoredConfig(config, head=head)
        self.compute_dtype = compute_dtype
        layers = range(config.num_hidden_layers) if layers is None else layers
        self.model = Body(config, layers, first=first, last=last, recompute=recompute)
        if not head:
            self.model.config = self.config  # the body is saved alone, under the names of a model without a head
        self.after_embedding = Dropout(config.embedding_dropout, "embedding")
        self.tp_group: Any = None
        if last and head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    @property
    def is_first(self) -> bool:
        return hasattr(self.model, "embed_tokens")

    @property
    def is_last(self) -> bool:
        return hasattr(self.model, "norm")

    @property
    def has_head(self) -> bool:
        return hasattr(self, "lm_head")

    def tie(self) -> None:
        """Tie embedding and head, if both are on this stage. Sharding separates them again."""
        if self.config.tie_word_embeddings and self.is_first and self.has_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor | None = None,
        *,
        keys: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return logits or hidden states; with experts, also the sums of all routers so far.

        `keys`, one per sequence, determine dropout; None disables it. `visible`, [batch, length], makes attention
        bidirectional over the positions where it is true.
        """
        length = x.shape[1] if self.is_first or self.tp_group is None else x.shape[1] * self.tp_group.size()
        grids = NO_DROPOUT if keys is None else self._dropout_grids(keys, length)
        if self.is_first:
            x = self.after_embedding(self.model.embed_tokens(x).to(self.compute_dtype), grids.features)
        by = rotation(self.config.model, length, x.device)
        own: torch.Tensor | None = None
        for block in self.model.layers.values():
            x, sums = block(x, by, grids, visible)
            if sums is not None:
                own = sums if own is None else own + sums
        if self.is_last:
            x = self.model.norm(x)
        if self.has_head:
            x = self.lm_head(x)
        elif self.is_last and self.tp_group is not None:
            x = gather_shared(x, self.tp_group, dim=1)
        if own is None:
            return x
        if self.tp_group is not None:
            own = sum_shared(own, self.tp_group)
        return x, own if chosen is None else chosen + own

    def _dropout_grids(self, keys: torch.Tensor, length: int) -> DropoutGrids:
        """Return the dropout grids for this rank's part of the sequence and of the heads."""
        config, size, rank = self.config.model, 1, 0
        if self.tp_group is not None:
            size, rank = self.tp_group.size(), self.tp_group.rank()
        features = attention = None
        if config.residual_dropout or config.embedding_dropout:
            features = feature_grid(keys, rank * (length // size), length // size, config.hidden_size)
        if config.attention_dropout:
            heads = config.num_attention_heads // size
            attention = attention_grid(keys, rank * heads, heads, length)
        return DropoutGrids(features, attention)
