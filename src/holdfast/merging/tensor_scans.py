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
from holdfast.merging.methods.base import Draws


def scanned_tensors(plan: MergePlan, draws: Draws) -> list[MergedTensor]:
    """Return the tensors that the method must scan: the largest first, or in the order of a random sequence."""
    found = []
    for tensor in plan.tensors.values():
        drawn = draws.sequential and tensor.task is not None and plan.method.is_random(tensor.task)
        if tensor.task is not None and (drawn or plan.method.needs_scan(tensor.task)):
            found.append(tensor)
    return sorted(found, key=lambda tensor: tensor.key if draws.sequential else (-tensor.elements, tensor.key))


def scan_tensors(plan: MergePlan, draws: Draws, ranks: Ranks, threads: int, progress: Progress) -> dict[str, Any]:
    """Return the results of the scans by key, on every rank. Collective."""
    own = scanned_tensors(plan, draws)[ranks.rank :: ranks.world]
    found: dict[str, Any] = {}

    def work(tasks: Iterator[MergedTensor]) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        files = [model.open_files() for model in plan.models]
        try:
            with torch.inference_mode():
                for tensor in tasks:
                    assert tensor.task is not None
                    found[tensor.key] = plan.method.scan(tensor.task, TensorChunks(tensor, files), draws)
                    progress(tensor.bytes)
        finally:
            for opened in files:
                opened.close()

    def share() -> dict[str, Any]:
        run_on_threads(min(threads, len(own)), "holdfast-scan", own, work)
        return found

    answers = run_on_all_ranks(ranks, share)
    draws.end_scans()
    return {key: value for answer in answers for key, value in answer.items()}
