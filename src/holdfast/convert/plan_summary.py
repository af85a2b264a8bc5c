"""Summary of a planned conversion: tensors, files, bytes, dtypes and casts of each group, from headers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.convert.sinks.base import Output
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The numbers of tensors, files and bytes of one target group, and of tensors by dtype."""

    name: str
    tensors: int
    files: int
    bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, slots=True)
class CastSummary:
    """The number of tensors of one group that are cast from one dtype to another."""

    group: str
    source: str
    target: str
    tensors: int


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """The contents of a planned output. The fields are part of `--json`."""

    groups: tuple[GroupSummary, ...]
    files: dict[str, int]
    casts: tuple[CastSummary, ...]
    turned: int  # tensors whose dims are permuted
    joined: int  # tensors concatenated from several sources

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def summary_of(output: Output) -> ConversionSummary:
    """Summarize a planned output."""
    tensors: Counter[str] = Counter()
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    casts: Counter[tuple[str, str, str]] = Counter()
    file_sizes: Counter[str] = Counter()  # a file may contain several groups
    permuted = joined = 0
    for file in output.files:
        file_sizes[file.plan.name] += file.plan.size
        files[file.group] += 1
        sizes[file.group] += file.plan.size
        tensors[file.group] += len(file.recipes)
        for recipe in file.recipes:
            dtypes.setdefault(file.group, Counter())[recipe.dtype.name] += 1
            permuted += _is_permuted(recipe)
            joined += len(recipe.sources()) > 1
            for source in {term.source.spec.dtype.name for term in recipe.terms if term.casts}:
                casts[file.group, source, recipe.dtype.name] += 1
    groups = tuple(
        GroupSummary(name, tensors[name], files[name], sizes[name], dict(sorted(dtypes.get(name, {}).items())))
        for name in files
    )
    return ConversionSummary(
        groups,
        dict(file_sizes),
        tuple(CastSummary(*names, count) for names, count in sorted(casts.items())),
        permuted,
        joined,
    )


def _is_permuted(recipe: Recipe[Place]) -> bool:
    return any(list(term.order) != sorted(term.order) for term in recipe.terms)
