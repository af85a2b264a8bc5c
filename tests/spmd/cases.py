"""The full product: every operation x size x mesh x placement x where the other inputs lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.spmd.table import SIZES, Input, Operation

MESHES = {"4": (4,), "2x2": (2, 2)}
WAYS = {
    "eager": "a plain call",
    "traced": "a plain call after a trace of it",
    "compiled": "a call within a compiled region",
    "thread": "a plain call in a second thread",
    "meshes": "a plain call whose other inputs are on another mesh",
}
PARTIALS = ("sum", "avg", "max", "min")


@dataclass(frozen=True, slots=True)
class Case:
    """One call to make, as words that travel between processes."""

    operation: str
    size: str
    mesh: str
    first: tuple[str, ...]  # the first placed input's placement on each axis: "R", "P" or the sharded dim
    others: str  # "follow": the other inputs are sharded along the same letters; "whole": replicated; "apart": neither
    laid: str = "rows"  # or "columns": the inputs lie in memory as transposed ones do
    way: str = "eager"  # or another of WAYS
    partial: str = "sum"  # what "P" stands for: one of PARTIALS
    shards: str = "plain"  # or "strided": the first axis that shards a tensor takes a part of each half of the dim

    def __str__(self) -> str:
        laid = ("" if self.laid == "rows" else f" {self.laid}") + ("" if self.shards == "plain" else f" {self.shards}")
        way = ("" if self.way == "eager" else f" {self.way}") + ("" if self.partial == "sum" else f" {self.partial}")
        return f"{self.operation}[{self.size} {self.mesh} {','.join(self.first)} {self.others}{laid}{way}]"


def cases_of(operation: Operation) -> Iterator[Case]:
    """Every case of one operation."""
    placed = [given for given in operation.inputs if not given.is_plain]
    dims = len(placed[0].letters)
    partial = operation.partial and placed[0].is_float and not operation.random
    choices = ("follow", "whole", "apart") if len(placed) > 1 else ("follow",)
    for size in SIZES:
        for mesh, first in _placements(dims, partial):
            for others in choices if first != ("R",) else choices[::2]:
                yield Case(operation.name, size, mesh, first, others)


def _placements(dims: int, partial: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    words = ["R", *map(str, range(dims)), *(["P"] if partial else [])]
    yield from (("4", (word,)) for word in words)
    yield from (("2x2", pair) for pair in itertools.product(words, words) if pair != ("R", "R"))


def placements_of(case: Case, operation: Operation) -> list[tuple[Placement, ...] | None]:
    """The placements of each input; None for a plain tensor."""
    leader = next(given for given in operation.inputs if not given.is_plain)
    result: list[tuple[Placement, ...] | None] = []
    for given in operation.inputs:
        if given.is_plain:
            result.append(None)
        elif given is leader:
            result.append(tuple(_placement(word, given.letters, given.letters, case.partial) for word in case.first))
        elif case.others == "whole":
            result.append(tuple(Replicate() for _ in case.first))
        elif case.others == "apart":
            result.append(tuple(_apart(word, given, operation.partial, case.partial) for word in case.first))
        else:
            follows = [_placement(word, leader.letters, given.letters, case.partial) for word in case.first]
            if not given.is_float:
                follows = [Replicate() if placement.is_partial() else placement for placement in follows]
            result.append(tuple(follows))
    return result if case.shards == "plain" else [None if places is None else _strided(places) for places in result]


def _strided(places: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return the placements with the first shard strided, as FSDP2 with TP and flattened activations have them."""
    for axis, place in enumerate(places):
        if isinstance(place, Shard):
            return (*places[:axis], _StridedShard(place.dim, split_factor=2), *places[axis + 1 :])
    return places


def _placement(word: str, leader: str, letters: str, partial: str) -> Placement:
    if word == "R":
        return Replicate()
    if word == "P":
        return Partial(partial)
    letter = leader[int(word)]
    return Shard(letters.index(letter)) if letter in letters else Replicate()


def _apart(word: str, given: Input, has_partials: bool, partial: str) -> Placement:
    """Parts beside shards, and shards beside what is whole or in parts."""
    if word.isdigit() and has_partials and given.is_float and given.kind not in ("constant", "variance"):
        return Partial(partial)
    if not given.letters:
        return Replicate()
    return Shard(len(given.letters) - 1 if word.isdigit() else 0)
