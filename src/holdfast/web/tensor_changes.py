"""Changes between two checkpoints: relative norms as a map of layers and tensors, added and missing keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from holdfast.checkpoint.differences import compare_state, equal_files
from holdfast.convert.mapping import MappingOptions, map_source
from holdfast.core.errors import HoldfastError, InvalidArgument, NotFound
from holdfast.core.names import natural_key
from holdfast.mapping import families
from holdfast.plan.contents import Contents
from holdfast.sources.foreign import Foreign
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import JobStop, PageJob
from holdfast.web.tensor_windows import WindowReader, as_values

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?:layers|h|blocks|block|layer))\.(?P<number>[0-9]{1,9})\.(?P<rest>.+)")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_LISTED = 2000  # keys of a list
_CELLS = 50_000
_DIFFERENCES = 500


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One side of a comparison: an open checkpoint, or its contents under a mapping."""

    opened: OpenStep
    contents: Contents | None = None

    def keys(self, group: str) -> list[str]:
        """Return the keys of a group in the order of its files; none if it does not exist."""
        if self.contents is not None:
            return list(self.contents.groups[group].tensors) if group in self.contents.groups else []
        return self.opened.index(group).keys if group in self.opened.checkpoint.groups else []

    def facts(self, group: str, key: str) -> tuple[tuple[int, ...], str, int]:
        """Return the shape, dtype and bytes of a tensor."""
        if self.contents is None:
            tensor = self.opened.tensor(group, key)
            return tensor.shape, tensor.dtype, tensor.bytes
        found = self.contents.find(group, key)
        if found is None:
            raise NotFound(f"no key {key[:200]!r} after the mapping")
        return found.logical_shape, found.logical, found.bytes


@dataclass(slots=True)
class TensorChange:
    """Sums over a change: of squares of the difference and of the first tensor."""

    gap: float = 0.0
    base: float = 0.0
    max_abs: float = 0.0
    elements: int = 0  # that differ

    @property
    def relative(self) -> float:
        """The norm of the change by the norm of the first; infinite for a change from zero."""
        if self.gap == 0:
            return 0.0
        return math.sqrt(self.gap / self.base) if self.base else math.inf

    def add(self, other: TensorChange) -> None:
        """Add the change of another tensor."""
        self.gap += other.gap
        self.base += other.base
        self.max_abs = max(self.max_abs, other.max_abs)
        self.elements += other.elements


@dataclass(slots=True)
class _Changes:
    """The changes found so far."""

    same: int = 0
    changed: dict[str, TensorChange] = field(default_factory=dict)
    all: dict[str, TensorChange] = field(default_factory=dict)
    reshaped: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)
    casts: int = 0


def mapped_side(opened: OpenStep, mapping: str | None) -> ComparedStep:
    """Return a side under one of the built-in mappings; raises InvalidArgument for another name."""
    if mapping is None:
        return ComparedStep(opened)
    if mapping not in mapping_names():
        raise InvalidArgument(f"{mapping[:80]!r} is not one of the built-in mappings: {', '.join(mapping_names())}")
    checkpoint = opened.checkpoint
    side_files: Mapping[str, bytes] = {}
    if isinstance(checkpoint, Foreign):
        side_files = {
            name: checkpoint.read_side_file(name) for name in checkpoint.side_files() if name == "config.json"
        }
    elif "config.json" in checkpoint.manifest.files:
        side_files = {"config.json": checkpoint.read_file("config.json")}
    mapped = map_source(checkpoint.contents, MappingOptions(written=mapping), side_files)
    return ComparedStep(opened, mapped.contents)


def mapping_names() -> list[str]:
    """Return the built-in mappings, both ways."""
    names = families.names()
    return sorted({*names, *(families.opposite(name) for name in names)})


def compare_steps(job: PageJob, one: ComparedStep, two: ComparedStep, group: str) -> dict[str, Any]:
    """Compare a group of two checkpoints; what the time limit allows, with `partial` if tensors are missing."""
    ones, twos = one.keys(group), two.keys(group)
    if not ones and not twos:
        raise NotFound(f"neither checkpoint has tensors in a group {group[:80]!r}")
    firsts, seconds = set(ones), set(twos)
    shared = [key for key in ones if key in seconds]
    equal = _equal_files(one, two, group)
    job.total = sum(one.facts(group, key)[2] for key in shared)
    found = _Changes()
    partial = False
    try:
        with (
            WindowReader(one.opened, lambda size: job.advance(0), one.contents) as first,
            WindowReader(two.opened, lambda size: job.advance(0), two.contents) as second,
        ):
            for key in shared:
                job.text = key
                _compare(found, group, key, (one, first), (two, second), equal)
                job.advance(one.facts(group, key)[2])
    except JobStop:
        if job.is_cancelled:
            raise
        partial = True
    return _result(found, sorted(seconds - firsts, key=natural_key), sorted(firsts - seconds, key=natural_key)) | {
        "group": group,
        "partial": partial,
        "state": _state_differences(one, two),
    }


def _equal_files(one: ComparedStep, two: ComparedStep, group: str) -> set[str]:
    if one.contents is not None or two.contents is not None:
        return set()
    checkpoints = one.opened.checkpoint, two.opened.checkpoint
    if any(isinstance(checkpoint, Foreign) or group not in checkpoint.groups for checkpoint in checkpoints):
        return set()
    return equal_files(*checkpoints, group)


def _compare(
    found: _Changes,
    group: str,
    key: str,
    one: tuple[ComparedStep, WindowReader],
    two: tuple[ComparedStep, WindowReader],
    equal: set[str],
) -> None:
    """Compare one tensor; the problem of one that cannot be read is recorded."""
    (first, reader), (second, other) = one, two
    shape, dtype, _ = first.facts(group, key)
    other_shape, other_dtype, _ = second.facts(group, key)
    if shape != other_shape:
        found.reshaped.append({"key": key, "first": list(shape), "second": list(other_shape)})
        return
    found.casts += dtype != other_dtype
    try:
        if equal and _is_stored_alike(first, second, group, key, equal):
            found.same += 1
            found.all[key] = TensorChange()
            return
        change = _change(reader, other, group, key)
    except HoldfastError as error:
        found.problems.append({"key": key, "text": str(error)})
        return
    found.all[key] = change
    if change.elements:
        found.changed[key] = change
    else:
        found.same += 1


def _is_stored_alike(one: ComparedStep, two: ComparedStep, group: str, key: str, equal: set[str]) -> bool:
    """Return True if a tensor is at the same place of a file with the same digests."""
    tensor = one.opened.tensor(group, key)
    return tensor.file in equal and tensor == two.opened.tensor(group, key)


def _change(reader: WindowReader, other: WindowReader, group: str, key: str) -> TensorChange:
    change = TensorChange()
    windows = zip(
        _even(reader.windows(reader.recipe(group, key))), _even(other.windows(other.recipe(group, key))), strict=True
    )
    for a, b in windows:
        x, y = as_values(a), as_values(b)
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        change.elements += int(np.count_nonzero(differs))
        finite = np.isfinite(x) & np.isfinite(y)
        with np.errstate(over="ignore"):
            gap = x[finite] - y[finite]
            change.gap += float(np.square(gap).sum())
            change.base += float(np.square(x[finite]).sum())
        if gap.size:
            change.max_abs = max(change.max_abs, float(np.abs(gap).max()))
    return change


def _even(windows: Any) -> Any:
    """Yield windows of equal sizes but for the last, whatever the sizes they come in."""
    from holdfast.web.tensor_windows import WINDOW_ELEMENTS

    rest: list[Any] = []
    held = 0
    for window in windows:
        at = 0
        while at < window.size:
            part = window[at : at + WINDOW_ELEMENTS - held]
            if held == 0 and part.size == WINDOW_ELEMENTS:
                yield part
            else:
                rest.append(part.copy())
                held += part.size
                if held == WINDOW_ELEMENTS:
                    yield np.concatenate(rest)
                    rest, held = [], 0
            at += part.size
    if held:
        yield rest[0] if len(rest) == 1 else np.concatenate(rest)


def _result(found: _Changes, added: list[str], missing: list[str]) -> dict[str, Any]:
    heat = heat_map(found.all)
    changed = sorted(found.changed.items(), key=lambda item: -(item[1].relative or math.inf))
    return {
        "same": found.same,
        "changed": len(found.changed),
        "casts": found.casts,
        "added": added[:_LISTED],
        "missing": missing[:_LISTED],
        "added_count": len(added),
        "missing_count": len(missing),
        "reshaped": found.reshaped[:_LISTED],
        "problems": found.problems[:_LISTED],
        "unread": len(found.problems),
        "compared": found.same + len(found.changed),
        "layers": heat.layers,
        "layer_changes": heat.layer_changes,
        "columns": heat.columns,
        "cells": heat.cells,
        "rest": heat.rest,
        "most_changed": [
            {"key": key, "relative": change.relative, "max_abs": change.max_abs, "elements": change.elements}
            for key, change in changed[:200]
        ],
    }


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The relative change of each layer, and of each of its tensors; and the tensors that are in no layer."""

    layers: list[str]
    layer_changes: list[float]
    columns: list[str]
    cells: list[list[float | None]]
    rest: list[dict[str, Any]]


def heat_map(changes: Mapping[str, TensorChange]) -> HeatMap:
    """Sort changes into layers. Experts and other numbered parts of a layer share a column."""
    cells: dict[tuple[str, str], TensorChange] = {}
    whole: dict[str, TensorChange] = {}
    rest: list[dict[str, Any]] = []
    stacks = {match["stack"] for key in changes if (match := _LAYER.fullmatch(key)) is not None}
    for key, change in changes.items():
        match = _LAYER.fullmatch(key)
        if match is None:
            rest.append({"key": key, "relative": change.relative, "max_abs": change.max_abs})
            continue
        row = match["number"] if len(stacks) == 1 else f"{match['stack']}.{match['number']}"
        column = _NUMBER.sub("*", f".{match['rest']}")[1:]
        cells.setdefault((row, column), TensorChange()).add(change)
        whole.setdefault(row, TensorChange()).add(change)
    layers = sorted(whole, key=natural_key)
    columns = sorted({column for _, column in cells}, key=natural_key)
    columns = columns[: max(1, _CELLS // max(1, len(layers)))]
    grid = [[cells[row, column].relative if (row, column) in cells else None for column in columns] for row in layers]
    return HeatMap(layers, [whole[row].relative for row in layers], columns, grid, rest[:_LISTED])


def _state_differences(one: ComparedStep, two: ComparedStep) -> list[dict[str, Any]]:
    try:
        differences = list(compare_state(one.opened.checkpoint, two.opened.checkpoint))
    except HoldfastError as error:
        return [{"group": "state.json", "key": "", "what": str(error)}]
    return [asdict(difference) for difference in differences[:_DIFFERENCES]]
