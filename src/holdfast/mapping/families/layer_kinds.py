"""The layers of a model by kind, from its config: dense, with experts, or predicting further tokens."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.mapping.families.fill import LayerBlock, LayerBlocks
from holdfast.mapping.families.numbers import Config, layers, number_or, numbers_or_none

_EVERY_LAYER = (LayerBlock("$LAYER_ID", "decoder.layers.$LAYER_ID"),)


def all_dense(_config: Config) -> LayerBlocks:
    return LayerBlocks(dense=_EVERY_LAYER)


def all_moe(_config: Config) -> LayerBlocks:
    return LayerBlocks(moe=_EVERY_LAYER)


def qwen_moe(config: Config) -> LayerBlocks:
    """Every `decoder_sparse_step`-th layer has experts, except the listed dense layers."""
    dense = set(numbers_or_none(config, "mlp_only_layers"))
    step = max(number_or(config, 1, "decoder_sparse_step"), 1)
    if not dense and step == 1:
        return LayerBlocks(moe=_EVERY_LAYER)
    return _by_number(layers(config), [n for n in range(layers(config)) if n in dense or (n + 1) % step])


def deepseek_v3(config: Config) -> LayerBlocks:
    """The first layers are dense. Layers after the last one, if stored, predict further tokens."""
    count = layers(config)
    frequency = max(number_or(config, 1, "moe_layer_freq"), 1)
    first = number_or(config, 0, "first_k_dense_replace")
    found = _by_number(count, [n for n in range(count) if n < first or n % frequency])
    more = number_or(config, 0, "num_nextn_predict_layers")
    inner = tuple(LayerBlock(f"{count + n}", f"mtp.layers.{n}.mtp_model_layer", optional=True) for n in range(more))
    outer = tuple(LayerBlock(f"{count + n}", f"mtp.layers.{n}", optional=True) for n in range(more))
    return LayerBlocks(dense=found.dense, moe=(*found.moe, *inner), predictors=outer)


def _by_number(count: int, dense: Sequence[int]) -> LayerBlocks:
    blocks = [LayerBlock(f"{n}", f"decoder.layers.{n}") for n in range(count)]
    return LayerBlocks(
        dense=tuple(blocks[n] for n in dense if n < count),
        moe=tuple(block for n, block in enumerate(blocks) if n not in set(dense)),
    )
