"""Drafts: one rank's share of a plan, before there is an arena to capture into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.commit import Commit
from holdfast.core.ranks import Ranks
from holdfast.engine.save_plan import plan_files
from holdfast.engine.survey import SaveOptions, Seen
from holdfast.format.digest import digest_hex
from holdfast.plan.writer_job import ArenaLayout, ArenaSpan, WriterJob, writer_job

if TYPE_CHECKING:
    import torch

    from holdfast.adapters.saving.agreement import Agreement
    from holdfast.adapters.saving.collected import Collected


@dataclass(frozen=True, slots=True)
class Source:
    """A span of the arena and what is captured into it: the numbers of the item and of its part."""

    item: int
    part: int
    span: ArenaSpan
    device: torch.device


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan of one layout: what it was made for, what the writer does, and where this rank's bytes go."""

    signature: Any
    agreement: Agreement
    owners: dict[str, list[str]]
    digest: str
    arena_bytes: int
    job: WriterJob
    commit: Commit | None  # rank 0's
    neighbours: list[int]
    sources: tuple[Source, ...]


def make_draft(ranks: Ranks, seen: Seen, options: SaveOptions) -> Draft:
    """Plan what the ranks of this host do for a state that all ranks agreed on."""
    agreement, first = seen.agreement, seen.first_replica
    here = agreement.hosts[ranks.rank]
    neighbours = [rank for rank, host in enumerate(agreement.hosts) if host == here]
    sizes = options.max_shard_bytes, options.block_bytes
    whole = options.whole_files
    planned = plan_files(agreement, *sizes, first, only=neighbours, all_files=ranks.rank == 0, whole_files=whole)
    layouts = {rank: ArenaLayout(planned.plan, rank) for rank in neighbours}
    own = layouts[ranks.rank]
    digest = digest_hex(repr([agreement.digest, agreement.hosts, *sizes, first, whole]).encode())
    return Draft(
        signature=seen.collected.signature(),
        agreement=agreement,
        owners=dict(seen.owners),
        digest=digest,
        arena_bytes=own.size,
        job=writer_job(planned.plan, digest, ranks.rank, layouts),
        commit=planned.commit(options.block_bytes) if ranks.rank == 0 else None,
        neighbours=neighbours,
        sources=tuple(_sources(seen.collected, own.spans, planned.group_of)),
    )


def coming_arena_bytes(ranks: Ranks, collected: Collected, agreement: Agreement, options: SaveOptions) -> int:
    """The size of this rank's arena once its optimizers have stepped, and a little more."""
    from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors, params_of

    sizes = options.max_shard_bytes, options.block_bytes
    planned = plan_files(agreement, *sizes, only=[ranks.rank], all_files=False, whole_files=options.whole_files)
    layout = ArenaLayout(planned.plan, ranks.rank)
    coming: dict[int, int] = {}
    for optimizer in collected.live_optimizers:
        for param in params_of(optimizer):
            coming[id(param)] = coming.get(id(param), 0) + missing_state_tensors(optimizer)
    size = layout.size
    for source in _sources(collected, layout.spans, planned.group_of):
        item = collected.items[source.item]
        if item.role == "parameter" and item.cast is None and item.source is not None:
            size += source.span.bytes * coming.get(id(item.source()), 0)
    return size + min(size, options.block_bytes) + size // 50  # owners of blocks take turns anew when tensors join


def _sources(collected: Collected, spans: list[ArenaSpan], group_of: Mapping[str, str]) -> list[Source]:
    """For each span of the arena the item and part that it is copied from."""
    by_box: dict[tuple[str, str, Any], tuple[int, int]] = {}
    for number, item in enumerate(collected.items):
        for index, part in enumerate(item.holder.parts):
            by_box.setdefault((item.group, item.key, part.box), (number, index))
    sources = []
    for span in spans:
        number, index = by_box[group_of[span.place.file], span.place.spec.key, span.held]
        sources.append(Source(number, index, span, collected.items[number].holder.local.device))
    return sources
