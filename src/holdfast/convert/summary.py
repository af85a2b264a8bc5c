"""What a conversion would write, from headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from holdfast.convert.sinks.base import Output
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group of the target: how many tensors in how many files, of what dtypes, how many bytes."""

    name: str
    tensors: int
    files: int
    bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, slots=True)
class CastSummary:
    """Tensors whose elements change their type on the way."""

    group: str
    source: str
    target: str
    tensors: int


@dataclass(frozen=True, slots=True)
class Summary:
    """All that would be written."""

    groups: tuple[GroupSummary, ...]
    files: dict[str, int]
    casts: tuple[CastSummary, ...]
    turned: int  # tensors whose dims change their order
    joined: int  # tensors that are made of several

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def summary_of(output: Output) -> Summary:
    """Count what a planned output holds."""
    tensors: Counter[str] = Counter()
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    casts: Counter[tuple[str, str, str]] = Counter()
    turned = joined = 0
    for file in output.files:
        files[file.group] += 1
        sizes[file.group] += file.plan.size
        tensors[file.group] += len(file.recipes)
        for recipe in file.recipes:
            dtypes.setdefault(file.group, Counter())[recipe.dtype.name] += 1
            turned += _is_turned(recipe)
            joined += len(recipe.sources()) > 1
            for source in {term.source.spec.dtype.name for term in recipe.terms if term.casts}:
                casts[file.group, source, recipe.dtype.name] += 1
    groups = tuple(
        GroupSummary(name, tensors[name], files[name], sizes[name], dict(sorted(dtypes.get(name, {}).items())))
        for name in files
    )
    return Summary(
        groups,
        {file.plan.name: file.plan.size for file in output.files},
        tuple(CastSummary(*names, count) for names, count in sorted(casts.items())),
        turned,
        joined,
    )


def _is_turned(recipe: Recipe[Place]) -> bool:
    return any(list(term.order) != sorted(term.order) for term in recipe.terms)
