"""The streaming of a merge: this rank's blocks of the output, merged chunk by chunk on threads and written."""

from __future__ import annotations

import bisect
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.spans import TensorFile
from holdfast.core.ranks import Ranks
from holdfast.core.terminal import Progress
from holdfast.core.threads import cores
from holdfast.merging.chunk_reader import ChunkMerger
from holdfast.merging.input_digests import InputDigests
from holdfast.merging.merge_plan import MergedTensor, MergePlan
from holdfast.merging.methods.base import Draws
from holdfast.plan.files import Place, aligned_buffer

MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class MergedBlock:
    """A block of an output file."""

    tensors: TensorFile
    offset: int
    size: int

    @property
    def file(self) -> str:
        return self.tensors.plan.name

    @property
    def header(self) -> bytes:
        return self.tensors.plan.header[self.offset : self.offset + self.size]

    def ranges(self) -> Iterator[tuple[Place, int, int, int]]:
        """Yield each tensor in the block, the range of its elements there, and the byte at which they begin."""
        places = self.tensors.plan.places
        first = max(0, bisect.bisect_right(places, self.offset, key=lambda place: place.begin) - 1)
        for place in places[first:]:
            begin, end = max(self.offset, place.begin), min(self.offset + self.size, place.end)
            if place.begin >= self.offset + self.size:
                return
            item = place.spec.dtype.bytes
            if begin < end:
                yield place, (begin - place.begin) // item, (end - place.begin) // item, begin - self.offset


def blocks_of(files: Sequence[TensorFile], block_bytes: int) -> list[MergedBlock]:
    """Return all blocks of the output, in order."""
    return [
        MergedBlock(file, offset, min(block_bytes, file.plan.size - offset))
        for file in files
        for offset in range(0, file.plan.size, block_bytes)
    ]


def blocks_of_rank(blocks: Sequence[MergedBlock], ranks: Ranks, *, whole_files: bool) -> list[MergedBlock]:
    """Return a rank's blocks: round-robin, or those of whole files where one process must write a file."""
    if not whole_files:
        return list(blocks[ranks.rank :: ranks.world])
    files = list(dict.fromkeys(block.file for block in blocks))
    own = set(files[ranks.rank :: ranks.world])
    return [block for block in blocks if block.file in own]


def thread_count(ranks: Ranks) -> int:
    """Return how many threads this rank uses, so that the ranks of one host share its processors."""
    here = ranks.gather(ranks.host())
    return max(1, min(MOST_THREADS, cores() // max(1, here.count(ranks.host()))))


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Let torch compute on the calling thread: the merge has threads of its own, and sums must not depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # inputs are mapped
            yield
    finally:
        torch.set_num_threads(before)


def write_blocks(
    plan: MergePlan,
    scanned: Mapping[str, Any],
    draws: Draws,
    blocks: Sequence[MergedBlock],
    attempt: Attempt,
    threads: int,
    digests: InputDigests,
    progress: Progress,
) -> tuple[list[BlockReport], dict[str, int]]:
    """Merge and write blocks on threads, and digest the inputs as they are used. Returns once all is durable.

    Also returns how many elements of the output are NaN or infinite, by key.
    """
    largest = max((block.size for block in blocks), default=0)
    begun = itertools.count(1)
    mergers: list[ChunkMerger] = []

    def gatherer() -> Callable[[MergedBlock], list[memoryview]]:
        torch.set_num_threads(1)  # a setting of each thread
        merger = ChunkMerger(plan, scanned, draws)
        mergers.append(merger)
        buffer = aligned_buffer(largest)

        def gather(block: MergedBlock) -> list[memoryview]:
            digests.advance(next(begun) / len(blocks))
            with torch.inference_mode():
                fill_block(block, merger, plan.tensors, buffer)
            return [buffer[: block.size].data]

        return gather

    try:
        reports = attempt.write(blocks, gatherer, threads, lambda report: progress(report.size), uncached=True)
        return reports, dict(sum((merger.not_finite for merger in mergers), Counter()))
    finally:
        for merger in mergers:
            merger.close()


def fill_block(block: MergedBlock, merger: ChunkMerger, tensors: Mapping[str, MergedTensor], buffer: Any) -> None:
    """Fill a buffer with the bytes of a block: its part of the header, and merged chunks."""
    header = block.header
    buffer[: len(header)] = np.frombuffer(header, np.uint8)
    for place, start, stop, at in block.ranges():
        tensor = tensors[place.spec.key]
        item = place.spec.dtype.bytes
        target = torch.from_numpy(buffer[at : at + (stop - start) * item]).view(getattr(torch, tensor.dtype.name))
        begin = start
        while begin < stop:
            end = min(stop, merger.chunk_end(tensor, begin))
            target[begin - start : end - start] = merger.merge(tensor, begin, end)
            begin = end
