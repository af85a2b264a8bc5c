"""Chunks of the inputs of an output tensor on one thread, cast to the dtype of the computation; the merged chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.convert.source_files import SourceFiles
from holdfast.core.errors import Mismatch
from holdfast.merging.merge_plan import MergedTensor, MergePlan
from holdfast.merging.methods import base
from holdfast.merging.methods.base import Draws


class TensorChunks:
    """Reads the inputs of one output tensor."""

    def __init__(self, tensor: MergedTensor, files: Sequence[SourceFiles]) -> None:
        self._tensor = tensor
        self._files = files

    def read(self, start: int, stop: int, inputs: Sequence[int] | None = None) -> list[torch.Tensor]:
        task, members = self._tensor.task, self._tensor.inputs
        chosen = members if inputs is None else [members[number] for number in inputs]
        chunks = [member.source.read(self._files, start, stop) for member in chosen]
        return chunks if task is None else [chunk.to(task.dtype) for chunk in chunks]


class ChunkMerger:
    """Merges chunks of any output tensor on one thread."""

    def __init__(self, plan: MergePlan, scanned: Mapping[str, Any], draws: Draws) -> None:
        self._plan = plan
        self._draws = draws
        self._scanned = scanned
        self._files = [model.open_files() for model in plan.models]

    def chunk_end(self, tensor: MergedTensor, begin: int) -> int:
        """Return where a chunk that begins at an element ends: a whole number of units from the first element on."""
        unit = 1 if tensor.task is None else self._plan.method.unit(tensor.task)
        step = -(-base.CHUNK_ELEMENTS // unit) * unit
        return (begin // step + 1) * step

    def merge(self, tensor: MergedTensor, start: int, stop: int) -> torch.Tensor:
        """Return the flat elements [start, stop) of an output tensor, in its dtype."""
        reader = TensorChunks(tensor, self._files)
        task = tensor.task
        if task is None:
            return self._copy(tensor, reader.read(start, stop))
        unit = self._plan.method.unit(task)
        begin, end = start - start % unit, min(tensor.elements, stop + -stop % unit)
        chunks = reader.read(begin, end)
        merged = self._plan.method.merge(task, self._scanned.get(tensor.key), begin, chunks, self._draws)
        return merged[start - begin : stop - begin].to(getattr(torch, tensor.dtype.name))

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
