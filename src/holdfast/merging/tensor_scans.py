"""Scans of whole tensors before the merge: each on one thread of one rank, in order, so that all get one result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.core.threads import run_on_threads
from holdfast.merging.chunk_reader import TensorChunks
from holdfast.merging.merge_plan import MergedTensor, MergePlan


def scanned_tensors(plan: MergePlan) -> list[MergedTensor]:
    """Return the tensors that the method must scan, the largest first."""
    found = [
        tensor for tensor in plan.tensors.values() if tensor.task is not None and plan.method.needs_scan(tensor.task)
    ]
    return sorted(found, key=lambda tensor: (-tensor.elements, tensor.key))


def scan_tensors(plan: MergePlan, ranks: Ranks, threads: int, progress: Progress) -> dict[str, Any]:
    """Return the results of the scans by key, on every rank. Collective."""
    own = scanned_tensors(plan)[ranks.rank :: ranks.world]
    found: dict[str, Any] = {}

    def work(tasks: Iterator[MergedTensor]) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        files = [model.open_files() for model in plan.models]
        try:
            with torch.inference_mode():
                for tensor in tasks:
                    assert tensor.task is not None
                    found[tensor.key] = plan.method.scan(tensor.task, TensorChunks(tensor, files))
                    progress(tensor.bytes)
        finally:
            for opened in files:
                opened.close()

    def share() -> dict[str, Any]:
        run_on_threads(min(threads, len(own)), "holdfast-scan", own, work)
        return found

    return {key: value for answer in run_on_all_ranks(ranks, share) for key, value in answer.items()}
