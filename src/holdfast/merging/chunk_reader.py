"""Chunks of the inputs of an output tensor on one thread, cast to the dtype of the computation; the merged chunk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.convert.source_files import SourceFiles
from holdfast.core.errors import Mismatch
from holdfast.merging.merge_plan import MergedTensor, MergePlan
from holdfast.merging.methods import base
from holdfast.merging.methods.base import Draws
from holdfast.plan.files import RawArray, aligned_buffer


class ReusedBuffers:
    """A buffer for each input of a tensor, used for chunk after chunk: fresh memory costs more than reading into it."""

    def __init__(self) -> None:
        self._buffers: list[RawArray] = []

    def take(self, number: int, size: int) -> RawArray:
        """Return an input's buffer of at least `size` bytes."""
        while len(self._buffers) <= number:
            self._buffers.append(aligned_buffer(0))
        if self._buffers[number].nbytes < size:
            self._buffers[number] = aligned_buffer(size)
        return self._buffers[number]


class TensorChunks:
    """Reads the inputs of one output tensor. With `reused` buffers a chunk lives until the next one is read."""

    def __init__(self, tensor: MergedTensor, files: Sequence[SourceFiles], reused: ReusedBuffers | None = None) -> None:
        self._tensor = tensor
        self._files = files
        self._reused = reused

    def read(self, start: int, stop: int, inputs: Sequence[int] | None = None) -> list[torch.Tensor]:
        task, members = self._tensor.task, self._tensor.inputs
        chosen = range(len(members)) if inputs is None else inputs
        chunks = [self._read(number, start, stop) for number in chosen]
        return chunks if task is None else [chunk.to(task.dtype) for chunk in chunks]

    def _read(self, number: int, start: int, stop: int) -> torch.Tensor:
        source = self._tensor.inputs[number].source
        size = (stop - start) * source.dtype.bytes
        buffer = None if self._reused is None else self._reused.take(number, size)
        return source.read(self._files, start, stop, buffer)


class ChunkMerger:
    """Merges chunks of any output tensor on one thread."""

    def __init__(self, plan: MergePlan, scanned: Mapping[str, Any], draws: Draws) -> None:
        self._plan = plan
        self._draws = draws
        self._scanned = scanned
        self._files = [model.open_files() for model in plan.models]
        self._buffers = ReusedBuffers()
        self.not_finite: Counter[str] = Counter()  # how many elements of each output tensor

    def chunk_end(self, tensor: MergedTensor, begin: int) -> int:
        """Return where a chunk that begins at an element ends: a whole number of units from the first element on."""
        unit = 1 if tensor.task is None else self._plan.method.unit(tensor.task)
        step = -(-base.CHUNK_ELEMENTS // unit) * unit
        return (begin // step + 1) * step

    def merge(self, tensor: MergedTensor, start: int, stop: int) -> torch.Tensor:
        """Return the flat elements [start, stop) of an output tensor, in its dtype, until the next call."""
        reader = TensorChunks(tensor, self._files, self._buffers)
        task = tensor.task
        if task is None:
            return self._copy(tensor, reader.read(start, stop))
        unit = self._plan.method.unit(task)
        begin, end = start - start % unit, min(tensor.elements, stop + -stop % unit)
        chunks = reader.read(begin, end)
        merged = self._plan.method.merge(task, self._scanned.get(tensor.key), begin, chunks, self._draws)
        merged = merged[start - begin : stop - begin].to(getattr(torch, tensor.dtype.name))
        bounds = torch.aminmax(merged) if merged.numel() else ()  # both are NaN if an element is
        if not all(math.isfinite(bound) for bound in bounds):
            self.not_finite[tensor.key] += int(merged.numel() - merged.isfinite().sum())
        return merged

    def _copy(self, tensor: MergedTensor, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a chunk of a tensor that is no floating-point tensor. Raises Mismatch if the inputs differ."""
        for number, chunk in enumerate(chunks):
            if chunk.dtype != chunks[0].dtype or not torch.equal(chunk, chunks[0]):
                paths = [self._plan.models[tensor.inputs[n].model].path for n in (0, number)]
                raise Mismatch(
                    f"{tensor.key!r} is {tensor.dtype.name}, which cannot be merged, and differs between {paths[0]} "
                    f"and {paths[1]}; --remove it, or make it equal"
                )
        return chunks[0]

    def close(self) -> None:
        for files in self._files:
            files.close()
