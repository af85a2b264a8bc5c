"""The work of a conversion as values: output blocks in spans, the source blocks they need, the spans of a rank."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.layout.box import Box
from holdfast.plan.files import FilePlan, Place, TensorRun, runs_in
from holdfast.plan.load_plan import StoredFile
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import VirtualFile

SPAN_BLOCKS = 3
_WIDE = 4

SourceBlock = tuple[str, int]  # a source file, and the index of one of its blocks


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor file to write, and the recipe of each of its places, in order."""

    group: str
    plan: FilePlan
    recipes: tuple[Recipe[Place], ...]


@dataclass(frozen=True, slots=True)
class OutputBlock:
    """A block of a file to write, as runs of its tensors."""

    file: TensorFile
    offset: int
    size: int

    @property
    def header(self) -> bytes:
        return self.file.plan.header[self.offset : self.offset + self.size]

    def runs(self) -> Iterator[tuple[TensorRun, Recipe[Place]]]:
        places = self.file.plan.places
        begins = [place.begin for place in places]
        recipes = dict(zip(places, self.file.recipes, strict=True))
        for run in runs_in(places, begins, self.offset, self.size):
            yield run, recipes[run.place]


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks that are assembled together, and the source blocks they need.

    Usually one block. If blocks need scattered bytes of a large source, as for a transpose, several
    blocks share one pass over that source.
    """

    blocks: tuple[OutputBlock, ...]
    touches: tuple[SourceBlock, ...]

    @property
    def file(self) -> str:
        return self.blocks[0].file.plan.name


def plan_spans(
    files: Sequence[TensorFile],
    sources: Sequence[StoredFile],
    block_bytes: int,
    virtual: Mapping[str, VirtualFile] | None = None,
) -> list[BlockSpan]:
    """Return the spans of all blocks of the files, in order."""
    finder = SourceBlockFinder(sources, virtual)
    spans: list[BlockSpan] = []
    for file in files:
        wide: list[BlockSpan] = []
        for offset in range(0, file.plan.size, block_bytes):
            span, is_wide = finder.span(OutputBlock(file, offset, min(block_bytes, file.plan.size - offset)))
            if wide and (not is_wide or len(wide) == SPAN_BLOCKS):
                spans.append(_joined(wide))
                wide = []
            if is_wide:
                wide.append(span)
            else:
                spans.append(span)
        if wide:
            spans.append(_joined(wide))
    return spans


def _joined(spans: Sequence[BlockSpan]) -> BlockSpan:
    touches = dict.fromkeys(touched for span in spans for touched in span.touches)
    return BlockSpan(tuple(block for span in spans for block in span.blocks), tuple(touches))


class SourceBlockFinder:
    """Finds the blocks of source files that an output block needs. Computed files need the blocks of their inputs."""

    def __init__(self, sources: Sequence[StoredFile], virtual: Mapping[str, VirtualFile] | None = None) -> None:
        self._virtual = virtual or {}
        self._offsets = {file.name: [block.offset for block in file.blocks] for file in sources}

    def span(self, block: OutputBlock) -> tuple[BlockSpan, bool]:
        touches: dict[SourceBlock, None] = {}
        reach = 0
        for run, recipe in block.runs():
            for term in recipe.overlapping(run.box):
                begin, end = byte_hull(term.source, term.part)
                reach += end - begin
                touches |= dict.fromkeys(self._touched(term.source.file, begin, end))
        return BlockSpan((block,), tuple(touches)), reach > _WIDE * block.size

    def touched(self, recipe: Recipe[Place], box: Box) -> Iterator[SourceBlock]:
        """Yield the source blocks that a box of a recipe's tensor needs, possibly with duplicates."""
        for term in recipe.overlapping(box):
            yield from self._touched(term.source.file, *byte_hull(term.source, term.part))

    def _touched(self, file: str, begin: int, end: int) -> Iterator[SourceBlock]:
        inputs = self._virtual[file].inputs(begin, end) if file in self._virtual else None
        if inputs is not None:
            for recipe, box in inputs:
                yield from self.touched(recipe, box)
            return
        offsets = self._offsets[file]
        first = bisect.bisect_right(offsets, begin) - 1
        for number in range(max(0, first), bisect.bisect_left(offsets, end)):
            yield file, number


def byte_hull(place: Place, part: Box) -> tuple[int, int]:
    """Return the byte range of a file from the first to the last element of a part of a tensor."""
    shape, item = place.spec.shape, place.spec.dtype.bytes
    last = Box(tuple(stop - 1 for stop in part.stops), (1,) * len(part.sizes))
    return place.begin + part.flat_offset(shape) * item, place.begin + (last.flat_offset(shape) + 1) * item


def spans_of_rank(spans: Sequence[BlockSpan], rank: int, world: int, *, whole_files: bool) -> list[int]:
    """Return the indices of a rank's spans: round-robin, or whole files where one process must write a file."""
    if not whole_files:
        return list(range(rank, len(spans), world))
    files = list(dict.fromkeys(span.file for span in spans))
    own = set(files[rank::world])
    return [number for number, span in enumerate(spans) if span.file in own]


def first_touches(spans: Sequence[BlockSpan]) -> Mapping[int, list[SourceBlock]]:
    """Return the source blocks by the first span that needs them. The rank of that span verifies them."""
    seen: set[SourceBlock] = set()
    out: dict[int, list[SourceBlock]] = {}
    for number, span in enumerate(spans):
        fresh = [touched for touched in span.touches if touched not in seen]
        seen.update(fresh)
        out[number] = fresh
    return out
