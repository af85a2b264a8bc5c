"""Sizes of a checkpoint, of the memory of its save, and of a restore, from the code that writes and reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.core.names import file_stem, index_file
from holdfast.engine.checkpoint_plan import plan_checkpoint
from holdfast.engine.options import LoadOptions, SaveOptions
from holdfast.engine.rank_plan import prepared_arena_bytes
from holdfast.plan.writer_job import ArenaLayout

if TYPE_CHECKING:
    from holdfast.adapters.saving.agreement import Agreement


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A group in a checkpoint: its tensors, its files, the bytes of its tensors, and of its files with the index."""

    name: str
    tensors: int
    files: int
    tensor_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """The groups of a checkpoint. The manifest, state.json and config files are not counted."""

    groups: tuple[GroupSize, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all tensor files and their indexes on disk."""
        return sum(group.file_bytes for group in self.groups)


@dataclass(frozen=True, slots=True)
class RestoreSize:
    """A restore on one rank: the bytes that it takes, and its buffers, page-locked for a GPU, at most `limit_bytes`."""

    bytes: int
    pinned_bytes: int
    limit_bytes: int


def save_sizes(
    agreement: Agreement, options: SaveOptions, ranks: Collection[int]
) -> tuple[CheckpointSize, dict[int, int]]:
    """Return the size of a checkpoint, and the arenas that a Checkpointer prepares on some ranks."""
    plan = plan_checkpoint(agreement, options, only=ranks)
    arenas = {rank: prepared_arena_bytes(ArenaLayout(plan.save, rank).size, options) for rank in ranks}
    commit = plan.commit(options.block_bytes)
    indexes = commit.indexes()
    sizes = {file.name: file.size for file in commit.files}
    groups = []
    for name, record in commit.groups.items():
        index = indexes.get(index_file(file_stem(name, record.kind)), b"")
        on_disk = sum(sizes[file] for file in record.files) + len(index)
        groups.append(GroupSize(name, len(commit.keys[name]), len(record.files), record.total_bytes, on_disk))
    return CheckpointSize(tuple(groups)), arenas


def restore_sizes(agreement: Agreement, ranks_per_host: int, options: LoadOptions) -> list[RestoreSize]:
    """Return what a restore of every rank reads, and the buffers that it reads through on a machine like this one."""
    from holdfast.adapters.loading.device_staging import pinned_bytes

    found = [0] * len(agreement.hosts)
    counted: dict[tuple[tuple[int, ...], object], dict[int, int]] = {}
    for tensor in agreement.tensors.values():
        kind = (tensor.shape, tensor.spread)
        if kind not in counted:
            counted[kind] = {}
            for rank, box in tensor.spread.boxes(tensor.shape):
                counted[kind][rank] = counted[kind].get(rank, 0) + box.volume
        for rank, elements in counted[kind].items():
            found[rank] += elements * tensor.dtype.bits // 8
    neighbors = min(ranks_per_host, len(found))
    limit = options.memory_limit_bytes
    return [RestoreSize(size, pinned_bytes(limit, neighbors), limit) for size in found]
