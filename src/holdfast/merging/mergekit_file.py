"""The fields of mergekit's YAML as options of a merge. What is not supported is named."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.merging.merge_options import MergeOptions, ModelOptions, SliceOptions, SliceSource, real_path
from holdfast.merging.methods import METHODS
from holdfast.merging.parameter_settings import Setting, SettingRule, Settings, number

_FIELDS = ("merge_method", "models", "slices", "base_model", "dtype", "out_dtype", "parameters", "tokenizer_source")
_UNUSED = ("int8_mask",)  # changes only how mergekit stores a mask


def mergekit_options(fields: Mapping[str, Any], where: str) -> MergeOptions:
    """Return the options that mergekit's fields describe. Raises Unsupported with the names of what cannot be read."""
    return _MergekitReader(fields, where).options()


class _MergekitReader:
    """Reads one description."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where
        self._ignored: set[str] = set()
        method = str(fields["merge_method"])
        if method not in METHODS:
            raise Unsupported(f"{where}: the method {method} is not supported; those are {', '.join(METHODS)}")
        self._method = METHODS[method]
        self._known = {parameter.name for parameter in self._method.parameters}

    def options(self) -> MergeOptions:
        fields = self._fields
        self._refuse(fields, _FIELDS, "")
        models: list[ModelOptions] = []
        slices = tuple(self._slice(part, models) for part in fields.get("slices") or ())
        for model in fields.get("models") or ():
            self._refuse(model, ("model", "parameters"), "models: ")
            models.append(ModelOptions(self._path(model.get("model")), self._settings(model.get("parameters"))))
        if not models or (slices and fields.get("models")):
            raise InvalidArgument(f"{self._where}: expected either models or slices")
        base = fields.get("base_model")
        parameters = self._settings(fields.get("parameters"))
        tokens, donor = self._tokens()
        return MergeOptions(
            models=tuple(models),
            method=self._method.name,
            base=self._base(base, models),
            parameters=parameters,
            slices=slices,
            donor=donor,
            tokens=tokens,
            dtype=_dtype(fields.get("dtype")),
            out_dtype=_dtype(fields.get("out_dtype")),
            notes=tuple(f"{self._where}: {self._method.name} has no {name}" for name in sorted(self._ignored)),
        )

    def _base(self, written: Any, models: Sequence[ModelOptions]) -> ModelOptions | None:
        """Return the base. mergekit lets a method without one name it, for config and tokenizer."""
        if written is None:
            return None
        base = ModelOptions(self._path(written))
        listed = any(real_path(model.path) == real_path(base.path) for model in models)
        if not listed and not self._method.needs_base:
            raise InvalidArgument(
                f"{self._where}: {self._method.name} needs no base; name {base.path} among the models"
            )
        return base

    def _tokens(self) -> tuple[str | None, str | None]:
        """Return how vocabularies are joined, and the model whose tokenizer is copied if it is named."""
        source = self._fields.get("tokenizer_source")
        if source is None:
            return None, None
        return (source if source == "union" else "donor"), None if source in ("union", "base") else self._path(source)

    def _slice(self, written: Any, models: list[ModelOptions]) -> SliceOptions:
        self._refuse(written, ("sources", "parameters"), "slices: ")
        sources = []
        for source in written.get("sources") or ():
            self._refuse(source, ("model", "layer_range", "parameters"), "sources: ")
            path = self._path(source.get("model"))
            found = [number for number, model in enumerate(models) if real_path(model.path) == real_path(path)]
            if not found:
                models.append(ModelOptions(path))
            layers = source.get("layer_range")
            if not (isinstance(layers, Sequence) and len(layers) == 2 and all(type(n) is int for n in layers)):
                raise InvalidArgument(f"{self._where}: expected layer_range as [first, end], got {layers!r}")
            place = found[0] if found else len(models) - 1
            sources.append(SliceSource(place, layers[0], layers[1], self._settings(source.get("parameters"))))
        if not sources:
            raise InvalidArgument(f"{self._where}: a slice needs sources")
        return SliceOptions(tuple(sources), self._settings(written.get("parameters")))

    def _path(self, written: Any) -> str:
        path = written.get("model", written) if isinstance(written, Mapping) else written
        others = sorted(map(str, written.keys() - {"model", "path"})) if isinstance(written, Mapping) else []
        if others:
            hint = "; merge the adapter first" if "lora" in others else ""
            raise Unsupported(f"{self._where}: a model with {', '.join(others)} is not supported{hint}")
        path = path.get("path") if isinstance(path, Mapping) else path
        if not isinstance(path, str):
            raise InvalidArgument(f"{self._where}: expected a model, got {written!r}")
        if "+" in path and not Path(path).exists():
            raise Unsupported(f"{self._where}: {path}: adapters with + are not supported; merge the adapter first")
        return path

    def _refuse(self, fields: Any, known: Sequence[str], place: str) -> None:
        if not isinstance(fields, Mapping):
            raise InvalidArgument(f"{self._where}: {place}expected a table of fields, got {fields!r:.100}")
        others = [str(name) for name in fields if name not in known and fields[name] is not None]
        if others:
            raise Unsupported(
                f"{self._where}: {place}{', '.join(others)}: not supported; supported: {', '.join(known)}"
            )

    def _settings(self, written: Any) -> Settings:
        """Return parameters. Those that the method does not have are ignored, as mergekit does, with a note."""
        out = {}
        for name, value in (written or {}).items():
            if name in self._known:
                out[name] = Setting(tuple(_rules(value, name)))
            elif name not in _UNUSED:
                self._ignored.add(str(name))
        return out


def _rules(value: Any, name: str) -> Iterator[SettingRule]:
    """Yield the rules of a value, a gradient, or a list of values with filters, which match a part of a key."""
    conditions = value if isinstance(value, list) and any(isinstance(part, Mapping) for part in value) else None
    if conditions is None and not isinstance(value, Mapping):
        yield SettingRule("*", _scalars(value, name))
        return
    for condition in conditions or [value]:
        if not isinstance(condition, Mapping) or "value" not in condition:
            raise InvalidArgument(f"{name}: expected a value and a filter, got {condition!r}")
        part = condition.get("filter")
        pattern = "*" if part in (None, "*") else f"*{glob.escape(str(part))}*"
        yield SettingRule(pattern, _scalars(condition["value"], name), may_match_nothing=True)


def _scalars(value: Any, name: str) -> tuple[bool | int | float, ...]:
    if value == []:
        raise InvalidArgument(f"{name}: expected a number, a list of numbers, or values with filters; got []")
    return tuple(number(part, name) for part in (value if isinstance(value, list) else [value]))


def _dtype(name: Any) -> str | None:
    return None if name is None else str(name).removeprefix("torch.")
