"""Write a DCP folder with torch's own writer: chunks of tensors assigned to ranks, read one by one. Imports torch."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.convert.assemble import tiles
from holdfast.convert.sinks.base import SinkContext
from holdfast.convert.sinks.dcp_state import NestedState, PendingTensor
from holdfast.core.errors import HoldfastError, StorageError
from holdfast.core.limits import MIB
from holdfast.layout.box import Box
from holdfast.plan.contents import Contents
from holdfast.plan.files import Place, TensorSpec

_CHUNK_BYTES = 32 * MIB


def write_folder(contents: Contents, context: SinkContext) -> None:
    """Write the context's folder. Each rank writes its own file. Collective."""
    nested = NestedState(contents)
    writer = FileSystemWriter(context.folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            save(nested.state, storage_writer=writer, planner=_BlockPlanner(nested, context))
        except CheckpointException as error:  # a BaseException with the failures of all ranks
            raise _first_failure(error) from None


def _first_failure(error: CheckpointException) -> HoldfastError:
    failures = [failure for failure, _ in error.failures.values()]
    known = [failure for failure in failures if isinstance(failure, HoldfastError)]
    return known[0] if known else StorageError(f"writing the DCP folder: {failures[0]}")


class _BlockPlanner(DefaultSavePlanner):
    """Assigns the chunks of every tensor to ranks round-robin, and reads each chunk when it is written."""

    def __init__(self, nested: NestedState, context: SinkContext) -> None:
        super().__init__()
        self._nested = nested
        self._context = context

    def create_local_plan(self) -> SavePlan:
        ranks = self._context.ranks
        items = [item for index, item in enumerate(self._tensor_items()) if index % ranks.world == ranks.rank]
        if self.is_coordinator:
            items += [
                WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
                for key, value in self.state_dict.items()
                if not isinstance(value, torch.Tensor)
            ]
        self.plan = dataclasses.replace(SavePlan(items), planner_data=self.mappings)
        return self.plan

    def _tensor_items(self) -> Iterator[WriteItem]:
        for key, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                pending = self._nested.pending(value)
                for box in _chunks(key, pending):
                    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    data = TensorWriteData(chunk, TensorProperties(dtype=pending.dtype), torch.Size(pending.shape))
                    yield WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            data: Any = super().resolve_data(write_item)
            assert isinstance(data, io.BytesIO)
            return data
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        pending = self._nested.pending(self.state_dict[write_item.index.fqn])
        raw = self._context.read(pending.recipe, pending.stored_box(box))
        self._context.progress(raw.nbytes)
        return pending.tensor(raw, box)


def _chunks(key: str, pending: PendingTensor) -> Iterator[Box]:
    """Split a tensor into boxes that are small compared with memory."""
    place = Place(TensorSpec(key, pending.logical, pending.shape), "", 0)
    full = Box.full(pending.shape)
    yield from tiles(full, place, _CHUNK_BYTES) if full.volume else [full]
