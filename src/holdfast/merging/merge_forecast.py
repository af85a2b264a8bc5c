"""The forecast of a merge from headers: what it reads and writes, its peak memory, and its time on this machine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.core.limits import MIB
from holdfast.core.threads import cores
from holdfast.merging.merge import BLOCK_BYTES, PreparedMerge
from holdfast.merging.merge_plan import MergedTensor, MergePlan
from holdfast.merging.merge_stream import MOST_THREADS, one_thread_per_operation
from holdfast.merging.methods import base
from holdfast.merging.methods.base import TensorTask
from holdfast.merging.random_masks import ElementDraws

_STORAGE_BYTES_PER_S = 1e9  # that a local disk reads and writes
_PORTION_BYTES = 4 * MIB  # for digests, on each thread and for each model
_HISTOGRAM_BYTES = 16 * MIB  # of the selection of the largest elements, on each thread
_WORK_ARRAYS = 4  # of float32 besides the inputs, while a chunk is merged


@dataclass(frozen=True, slots=True)
class MergeForecast:
    """The plan of a merge in numbers. The fields are part of `--json`.

    `peak_bytes` is the memory besides that of the imported libraries; `seconds` assumes a storage of 1 GB/s.
    """

    method: str
    models: tuple[str, ...]
    donor: str
    tensors: int
    dtypes: dict[str, int]
    files: int
    bytes: int
    read_bytes: int
    removed: int
    removed_bytes: int
    peak_bytes: int
    seconds: float


def forecast(merge: PreparedMerge) -> MergeForecast:
    """Return the forecast of a merge by one process. Reads no tensor; computes on a chunk of random numbers."""
    plan, threads = merge.plan, max(1, min(MOST_THREADS, cores()))
    inputs = sum(_input_bytes(tensor) for tensor in plan.tensors.values())
    scanned = [t for t in plan.tensors.values() if t.task is not None and plan.method.needs_scan(t.task)]
    read = inputs + sum(_input_bytes(tensor) for tensor in scanned)
    elements = sum(tensor.elements for tensor in plan.tensors.values() if tensor.task is not None)
    dtypes = Counter(tensor.dtype.name for tensor in plan.tensors.values())
    seconds = (read + merge.output.bytes) / _STORAGE_BYTES_PER_S + _element_s(plan) * elements / threads
    return MergeForecast(
        method=plan.method.name,
        models=tuple(model.path for model in plan.models),
        donor=plan.models[plan.donor].path,
        tensors=len(plan.tensors),
        dtypes=dict(sorted(dtypes.items())),
        files=len(merge.output.files),
        bytes=merge.output.bytes,
        read_bytes=read,
        removed=len(plan.removed.keys),
        removed_bytes=plan.removed.bytes,
        peak_bytes=threads * _thread_bytes(plan, merge.output.bytes, len(scanned)) + len(plan.models) * _PORTION_BYTES,
        seconds=round(seconds, 1),
    )


def _input_bytes(tensor: MergedTensor) -> int:
    return sum(tensor.elements * member.source.dtype.bytes for member in tensor.inputs)


def _thread_bytes(plan: MergePlan, total: int, scanned: int) -> int:
    """Return the memory of one thread: a block of the output, and the largest chunk with its work arrays."""
    chunks = [
        min(tensor.elements, max(base.CHUNK_ELEMENTS, plan.method.unit(tensor.task)))
        * (sum(m.source.dtype.bytes + 4 for m in tensor.inputs) + 4 * _WORK_ARRAYS)
        for tensor in plan.tensors.values()
        if tensor.task is not None
    ]
    return min(BLOCK_BYTES, total) + _PORTION_BYTES + max(chunks, default=0) + (_HISTOGRAM_BYTES if scanned else 0)


class _RandomChunk:
    """Inputs of random numbers in place of a model's."""

    def __init__(self, task: TensorTask) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tensors = [torch.randn(task.elements, generator=generator).to(task.dtype) for _ in task.names]

    def read(self, start: int, stop: int, inputs: Sequence[int] | None = None) -> list[torch.Tensor]:
        chosen: Sequence[int] = range(len(self._tensors)) if inputs is None else inputs
        return [self._tensors[number][start:stop].clone() for number in chosen]


def _element_s(plan: MergePlan) -> float:
    """Return the seconds for one element, measured on a chunk of the plan's most frequent kind of tensor."""
    tasks = [tensor.task for tensor in plan.tensors.values() if tensor.task is not None]
    if not tasks:
        return 0.0
    rows = (256, base.CHUNK_ELEMENTS // 256)
    task = replace(max(tasks, key=lambda task: task.elements), shape=rows, elements=math.prod(rows))
    reader, draws = _RandomChunk(task), ElementDraws(0)

    def once() -> float:
        start = time.perf_counter()
        scanned: Mapping[str, Any] | Any = None
        if plan.method.needs_scan(task):
            scanned = plan.method.scan(task, reader, draws)
        plan.method.merge(task, scanned, 0, reader.read(0, task.elements), draws)
        return time.perf_counter() - start

    with one_thread_per_operation():
        return min(once() for _ in range(2)) / task.elements
