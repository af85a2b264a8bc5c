"""A merge described in a YAML or TOML file: Holdfast's own fields, or those of mergekit."""

from __future__ import annotations

import importlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.merging.merge_options import MergeOptions, ModelOptions, SliceOptions, SliceSource, real_path, settings_of
from holdfast.merging.mergekit_file import mergekit_options

MODEL_FIELDS = ("path", "name", "mapping")
BESIDE_MERGEKIT = ("seed", "rng", "max_shard_size", "tokens")
_OUTPUT_FIELDS = ("donor", "dtype", "out_dtype", "max_shard_size", "seed", "rng", "tokens")
_FIELDS = ("method", "models", "slices", "base", "parameters", "remove", *_OUTPUT_FIELDS)


def read_merge_file(path: str | os.PathLike[str], others: Mapping[str, Any] | None = None) -> MergeOptions:
    """Return the options in a file. Paths in it are relative to its folder; in a file of mergekit to this folder.

    `others` are options given beside the file. A file of mergekit has no fields for some (`BESIDE_MERGEKIT`), which its
    own command line takes, or one in their place: `tokens` for tokenizer_source. Any other raises InvalidArgument.
    """
    others = others or {}
    fields = _load(Path(path).expanduser())
    is_mergekit = "merge_method" in fields
    refused = [name for name in others if not (is_mergekit and name in BESIDE_MERGEKIT)]
    refused += ["tokens"] if is_mergekit and "tokens" in others and fields.get("tokenizer_source") else []
    if refused:
        raise InvalidArgument(f"{refused[0]}: with a file, write it into the file {os.fspath(path)}")
    if is_mergekit:
        return replace(mergekit_options(fields, os.fspath(path)), **others)
    return _MergeFileReader(os.fspath(path)).options(fields)


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder: give the models as a list, or a YAML or TOML file that names them")
    try:
        if path.stat().st_size > limits.MAPPING_BYTES:
            raise InvalidArgument(f"{path}: larger than {limits.MAPPING_BYTES} bytes, not the description of a merge")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: not a text file") from None
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    try:
        fields = tomllib.loads(text) if path.suffix == ".toml" else _yaml().safe_load(text)
    except (tomllib.TOMLDecodeError, _yaml_error()) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{path}: expected fields such as method and models")
    return fields


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise Unsupported("reading YAML needs the package pyyaml: install it, or write the file as TOML") from None


def _yaml_error() -> type[Exception]:
    try:
        return _yaml().YAMLError  # type: ignore[no-any-return]
    except Unsupported:
        return tomllib.TOMLDecodeError


class _MergeFileReader:
    """Reads Holdfast's own fields."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._folder = Path(where).expanduser().parent

    def options(self, fields: Mapping[str, Any]) -> MergeOptions:
        unknown = [str(name) for name in fields if name not in _FIELDS]
        if unknown:
            raise InvalidArgument(f"{self._where}: unknown field {unknown[0]!r}; the fields are {', '.join(_FIELDS)}")
        if ("models" in fields) == ("slices" in fields):
            raise InvalidArgument(f"{self._where}: expected either models or slices")
        models: list[ModelOptions] = []
        slices: list[SliceOptions] = []
        for part in _list(fields.get("slices", ()), f"{self._where}: slices"):
            slices.append(self._slice(part, models))
        for model in _list(fields.get("models", ()), f"{self._where}: models"):
            models.append(self._model(model))
        base = self._model(fields["base"]) if fields.get("base") is not None else None
        remove = fields.get("remove", ())
        donor = fields.get("donor")
        output = {name: fields[name] for name in _OUTPUT_FIELDS if name in fields and name != "donor"}
        return MergeOptions(
            models=tuple(models),
            method=str(fields.get("method", "linear")),
            base=base,
            parameters=settings_of(_table(fields.get("parameters", {}), f"{self._where}: parameters")),
            slices=tuple(slices),
            remove=tuple([remove] if isinstance(remove, str) else map(str, remove)),
            donor=None if donor is None else self._donor(str(donor), models),
            **output,
        )

    def _model(self, written: Any) -> ModelOptions:
        if isinstance(written, str):
            return ModelOptions(self._path(written))
        fields = _table(written, f"{self._where}: a model")
        if not isinstance(fields.get("path"), str):
            raise InvalidArgument(f"{self._where}: a model needs a path; got {dict(fields)!r:.200}")
        parameters = settings_of({name: value for name, value in fields.items() if name not in MODEL_FIELDS})
        mapping = fields.get("mapping")
        if isinstance(mapping, str) and (self._folder / mapping).is_file():
            mapping = os.fspath(self._folder / mapping)
        return ModelOptions(self._path(fields["path"]), parameters, str(fields.get("name", "")), mapping)

    def _path(self, written: str) -> str:
        return written if "://" in written else os.fspath(self._folder / Path(written).expanduser())

    def _donor(self, written: str, models: Sequence[ModelOptions]) -> str:
        return written if written in {model.name for model in models} else self._path(written)

    def _slice(self, written: Any, models: list[ModelOptions]) -> SliceOptions:
        """Return a slice, and add the models that it is the first to use."""
        part = _table(written, f"{self._where}: a slice")
        sources = []
        for source in _list(part.get("models", ()), f"{self._where}: models of a slice"):
            fields = dict(_table(source, f"{self._where}: a model of a slice"))
            begin, end = layer_range(fields.pop("layers", None), self._where)
            model = self._model(fields)
            plain = ModelOptions(model.path, {}, model.name, model.mapping)
            sources.append(SliceSource(add_model(models, plain), begin, end, model.parameters))
        if not sources:
            raise InvalidArgument(f"{self._where}: a slice needs models, each with a path and layers: [first, end]")
        return SliceOptions(tuple(sources), settings_of(part.get("parameters")))


def add_model(models: list[ModelOptions], model: ModelOptions) -> int:
    """Return the number of a model in a list, which it is added to if its path is new."""
    path = real_path(model.path)
    for number, known in enumerate(models):
        if real_path(known.path) == path:
            return number
    models.append(model)
    return len(models) - 1


def layer_range(written: Any, where: str) -> tuple[int, int]:
    """Return the first layer and the one after the last."""
    if not (isinstance(written, Sequence) and len(written) == 2 and all(type(number) is int for number in written)):
        raise InvalidArgument(f"{where}: expected layers as [first, end], got {written!r}")
    return written[0], written[1]


def _table(written: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(written, Mapping):
        raise InvalidArgument(f"{where}: expected a table of fields, got {written!r:.100}")
    return written


def _list(written: Any, where: str) -> Sequence[Any]:
    if not isinstance(written, Sequence) or isinstance(written, str):
        raise InvalidArgument(f"{where}: expected a list, got {written!r:.100}")
    return written
