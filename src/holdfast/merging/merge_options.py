"""The options of a merge as values: models with their parameters, the method, the output."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.convert.select import model_dtype
from holdfast.core.errors import InvalidArgument
from holdfast.merging.parameter_settings import Setting, Settings

RNGS = ("holdfast", "mergekit")
# Refuse other tokens, join models by token (all tokens, or the donor's), or merge them row by row.
TOKENS = (None, "union", "donor", "rows")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """One model of a merge: its path, its own parameters, and a mapping to the names of the other models.

    `name` stands for the model in random numbers and in the record; by default it is the end of the path.
    """

    path: str
    parameters: Settings = field(default_factory=dict)
    name: str = ""
    mapping: Any = None


@dataclass(frozen=True, slots=True)
class SliceSource:
    """Layers [begin, end) of a model, given by its number among the models, with parameters for this use."""

    model: int
    begin: int
    end: int
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Consecutive layers of the output, merged from as many layers of each source."""

    sources: tuple[SliceSource, ...]
    parameters: Settings = field(default_factory=dict)

    @property
    def layers(self) -> int:
        return self.sources[0].end - self.sources[0].begin


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """A merge: its models, its method with the parameters of all models, and the output.

    `slices` give the layers of the output one after another; without them all layers of all models are merged.
    """

    models: tuple[ModelOptions, ...]
    method: str = "linear"
    base: ModelOptions | None = None
    parameters: Settings = field(default_factory=dict)
    slices: tuple[SliceOptions, ...] = ()
    donor: str | None = None  # the model whose config, tokenizer and other side files are copied
    dtype: str | None = None  # of the computation and, without out_dtype, of the output
    out_dtype: str | None = None
    remove: tuple[str, ...] = ()
    max_shard_size: int | str = "5GB"
    tokens: str | None = None  # how models with other tokens are merged, see `TOKENS`
    seed: int = 0
    rng: str = "holdfast"
    verify: bool = True
    force: bool = False
    notes: tuple[str, ...] = ()  # of what described the merge

    def __post_init__(self) -> None:
        for name in (self.dtype, self.out_dtype):
            if name is not None:
                model_dtype(name)
        if self.rng not in RNGS:
            raise InvalidArgument(f"rng={self.rng!r}: choose one of {', '.join(RNGS)}")
        if self.tokens not in TOKENS:
            raise InvalidArgument(f"tokens={self.tokens!r}: choose 'union', 'donor' or 'rows', or leave it out")
        if not self.models:
            raise InvalidArgument("a merge needs at least one model")
        for part in self.slices:
            _check_slice(part)

    @property
    def all_models(self) -> tuple[ModelOptions, ...]:
        """The models in the order in which they are added up: a base that is not one of them comes last."""
        base = self.base
        if base is None or base_position(self.models, base) is not None:
            return self.models
        return (*self.models, base)


def _check_slice(part: SliceOptions) -> None:
    for source in part.sources:
        if not 0 <= source.begin < source.end:
            raise InvalidArgument(f"layers [{source.begin}, {source.end}]: expected a first layer, and one after it")
        if source.end - source.begin != part.layers:
            raise InvalidArgument(
                f"layers [{source.begin}, {source.end}]: the sources of a slice must have equally many layers, and the "
                f"first one has {part.layers}"
            )


def base_position(models: Sequence[ModelOptions], base: ModelOptions) -> int | None:
    """Return the position of the base among the models, None if it is not one of them."""
    path = real_path(base.path)
    return next((number for number, model in enumerate(models) if real_path(model.path) == path), None)


def real_path(path: str) -> str:
    """Return a path that is equal for equal folders; an address is returned as it is."""
    return path if "://" in path else os.path.realpath(Path(path).expanduser())


def model_names(models: Sequence[ModelOptions]) -> list[str]:
    """Return the name of every model: the given one, or the shortest end of its path that no other model shares.

    Names do not depend on the order of the models, nor on the folder that all of them are in.
    """
    paths = [[part for part in real_path(model.path).split("/") if part] or ["/"] for model in models]
    names = []
    for number, model in enumerate(models):
        others = [path for other, path in enumerate(paths) if other != number]
        ends = (paths[number][-count:] for count in range(1, len(paths[number]) + 1))
        unique = (end for end in ends if not any(path[-len(end) :] == end for path in others))
        names.append(model.name or "/".join(next(unique, paths[number])))
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidArgument(f"{models[number].path} is in the merge twice; give it once, with its whole weight")
    return names


def settings_of(written: Mapping[str, Any] | None) -> dict[str, Setting]:
    """Return parameters as settings; values that are None are left out."""
    return {name: Setting.of(value, name) for name, value in (written or {}).items() if value is not None}
