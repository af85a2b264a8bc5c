"""Verification of the inputs of a merge: the digests of all blocks that are used, on one thread for each model."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from holdfast.convert.spans import SourceBlock
from holdfast.convert.stream import Workers
from holdfast.convert.verifying import Verifier
from holdfast.core.ranks import Ranks
from holdfast.merging.merge_plan import MergePlan
from holdfast.merging.model_input import InputModel


@contextmanager
def verifying(plan: MergePlan, ranks: Ranks, *, enabled: bool) -> Iterator[None]:
    """Verify this rank's share of the inputs beside the work within; raises Damaged at its end, or earlier."""
    workers = Workers()
    queues: list[queue.SimpleQueue[SourceBlock | None]] = []
    for model in plan.models if enabled else ():
        blocks = _used_blocks(model)[ranks.rank :: ranks.world]
        if blocks:
            waiting: queue.SimpleQueue[SourceBlock | None] = queue.SimpleQueue()
            for block in (*blocks, None):
                waiting.put(block)
            queues.append(waiting)
            verifier = Verifier(model.source, model.stored, model.lock)
            workers.start("verify", partial(verifier.run, waiting, workers.stop))
    try:
        yield
        workers.join()
        workers.check()
    finally:
        workers.stop.set()
        workers.join()


def _used_blocks(model: InputModel) -> list[SourceBlock]:
    """Return the blocks with digests that hold tensors of the merge."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for source in model.tensors.values():
        for place in source.places(model.number):
            ranges.setdefault(place.file, []).append((place.begin, place.end))
    return [
        (file.name, number)
        for file in model.stored
        for number, block in enumerate(file.blocks)
        if block.digest is not None
        and any(begin < block.offset + block.size and block.offset < end for begin, end in ranges.get(file.name, ()))
    ]
