"""The keys of the output: which keys of which models each one is merged from, for whole models or slices of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument
from holdfast.merging.layers import LayerNames
from holdfast.merging.merge_options import MergeOptions, SliceOptions
from holdfast.merging.model_input import InputModel
from holdfast.merging.parameter_settings import Settings

_INPUT_EMBEDDING = re.compile(r"(?:.*\.)?(?:\w*embed(?!_out|.*_out)\w*|wte|wpe)\.(?:\w+\.)*\w+")


@dataclass(frozen=True, slots=True)
class InputKey:
    """A key of a model, and the settings for it: those of the slice's source, of the model, of all."""

    model: int
    key: str
    settings: tuple[Settings, ...]


@dataclass(frozen=True, slots=True)
class OutputKey:
    """A key of the output, its depth from 0 (first layer of its slice) to 1, its inputs, and the shared settings."""

    key: str
    depth: float
    inputs: tuple[InputKey, ...]
    settings: tuple[Settings, ...]


def whole_keys(options: MergeOptions, models: Sequence[InputModel], keys: Sequence[str], donor: int) -> list[OutputKey]:
    """Return the keys of a merge of whole models: those of the donor, from the same key of every model."""
    layers = LayerNames.of(keys, models[donor].config)
    scopes = [(model.options.parameters, options.parameters) for model in models]
    return [
        OutputKey(
            key,
            layers.depth(key),
            tuple(InputKey(number, key, scopes[number]) for number in range(len(models))),
            (options.parameters,),
        )
        for key in keys
    ]


class SlicedKeys:
    """The keys of an output whose layers come from slices of layers."""

    def __init__(self, options: MergeOptions, models: Sequence[InputModel], donor: int) -> None:
        self._options = options
        self._models = models
        self._donor = donor
        self._layers = [LayerNames.of(model.tensors, model.config) for model in models]
        for part in options.slices:
            for source in part.sources:
                count = self._layers[source.model].count
                if source.end > count:
                    raise InvalidArgument(
                        f"layers [{source.begin}, {source.end}] of {models[source.model].path}: it has {count} layers"
                    )

    @property
    def count(self) -> int:
        """The number of layers of the output."""
        return sum(part.layers for part in self._options.slices)

    def origins(self) -> list[tuple[int, int]]:
        """Return for each layer of the output the number of its first model, and the layer there."""
        return [
            (part.sources[0].model, part.sources[0].begin + layer)
            for part in self._options.slices
            for layer in range(part.layers)
        ]

    def keys(self) -> list[OutputKey]:
        """Return all keys: input embeddings from the first slice, layers, the rest from the last slice."""
        slices = self._options.slices
        out = []
        for key in self._models[self._donor].tensors:
            if self._layers[self._donor].number(key) is None:
                part = slices[0] if _INPUT_EMBEDDING.fullmatch(key) else slices[-1]
                out.append(self._output(part, key, 0.0, [key] * len(part.sources)))
        begin = 0
        for part in slices:
            for layer in range(part.layers):
                out += self._layer(part, layer, begin + layer)
            begin += part.layers
        return out

    def _layer(self, part: SliceOptions, layer: int, number: int) -> Iterator[OutputKey]:
        """Yield the keys of one layer of the output."""
        depth = layer / (part.layers - 1) if part.layers > 1 else 1.0
        first = part.sources[0]
        prefix = f"{self._layers[first.model].prefix}{first.begin + layer}."
        target = self._layers[self._donor].prefix
        for key in self._models[first.model].tensors:
            if key.startswith(prefix):
                rest = key.removeprefix(prefix)
                keys = [f"{self._layers[s.model].prefix}{s.begin + layer}.{rest}" for s in part.sources]
                yield self._output(part, f"{target}{number}.{rest}", depth, keys)

    def _output(self, part: SliceOptions, key: str, depth: float, keys: Sequence[str]) -> OutputKey:
        shared = (part.parameters, self._options.parameters)
        inputs = tuple(
            InputKey(source.model, own, (source.parameters, self._models[source.model].options.parameters, *shared))
            for source, own in zip(part.sources, keys, strict=True)
        )
        return OutputKey(key, depth, inputs, shared)
