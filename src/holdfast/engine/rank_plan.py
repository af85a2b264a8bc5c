"""One rank's share of a save plan: its writer's job, the sources of its arena, the forecast of the arena's size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.commit import Commit
from holdfast.core.ranks import Ranks
from holdfast.engine.checkpoint_plan import plan_checkpoint
from holdfast.engine.options import SaveOptions
from holdfast.engine.survey import LayoutSurvey, Survey
from holdfast.format.digest import digest_hex
from holdfast.plan.writer_job import ArenaLayout, ArenaSpan, WriterJob, writer_job

if TYPE_CHECKING:
    import torch

    from holdfast.adapters.saving.agreement import Agreement
    from holdfast.adapters.saving.collect import Collected


@dataclass(frozen=True, slots=True)
class CaptureSource:
    """A span of the arena and its source: the indices of the collected item and of its part."""

    item: int
    part: int
    span: ArenaSpan
    device: torch.device


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan of one layout for one rank: its writer's job, and the sources of its arena.

    The plan is valid as long as the state has the same `signature` on every rank.
    """

    signature: Any
    agreement: Agreement
    owners: Mapping[str, list[str]]
    digest: str
    arena_bytes: int
    job: WriterJob
    commit: Commit | None  # rank 0's
    neighbors: tuple[int, ...]  # the ranks of this host
    sources: tuple[CaptureSource, ...]
    captured_bytes: int  # of all sources
    total_bytes: int  # of all files, on rank 0; 0 on other ranks


def plan_rank(ranks: Ranks, survey: Survey, options: SaveOptions) -> RankPlan:
    """Plan the work of this host's ranks for a surveyed state."""
    agreement, first = survey.agreement, survey.first_replica
    here = agreement.hosts[ranks.rank]
    neighbors = tuple(rank for rank, host in enumerate(agreement.hosts) if host == here)
    plan = plan_checkpoint(agreement, options, first, only=neighbors, all_files=ranks.rank == 0)
    layouts = {rank: ArenaLayout(plan.save, rank) for rank in neighbors}
    own = layouts[ranks.rank]
    sizes = options.max_shard_bytes, options.block_bytes
    digest = digest_hex(repr([agreement.digest, agreement.hosts, *sizes, first, options.whole_files]).encode())
    commit = plan.commit(options.block_bytes, survey.layout.mappings) if ranks.rank == 0 else None
    sources = tuple(_sources(survey.collected, own.spans, plan.group_of))
    return RankPlan(
        signature=survey.collected.signature(),
        agreement=agreement,
        owners=dict(survey.layout.owners),
        digest=digest,
        arena_bytes=own.size,
        job=writer_job(plan.save, digest, ranks.rank, layouts),
        commit=commit,
        neighbors=neighbors,
        sources=sources,
        captured_bytes=sum(source.span.bytes for source in sources),
        total_bytes=sum(file.size for file in commit.files) if commit else 0,
    )


def forecast_arena_bytes(ranks: Ranks, layout: LayoutSurvey, options: SaveOptions) -> int:
    """Return the size of this rank's arena once its optimizers have stepped, with a small margin."""
    from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors, params_of

    collected = layout.collected
    plan = plan_checkpoint(layout.agreement, options, only=[ranks.rank], all_files=False)
    arena = ArenaLayout(plan.save, ranks.rank)
    missing: dict[int, int] = {}
    for name, optimizer in collected.live_optimizers.items():
        if name not in collected.optimizers:
            continue  # patterns leave its state out
        for param in params_of(optimizer):
            missing[id(param)] = missing.get(id(param), 0) + missing_state_tensors(optimizer)
    size = arena.size
    for source in _sources(collected, arena.spans, plan.group_of):
        item = collected.items[source.item]
        if item.role == "parameter" and item.cast is None and item.source is not None:
            size += source.span.bytes * missing.get(id(item.source()), 0)
    return prepared_arena_bytes(size, options)


def prepared_arena_bytes(size: int, options: SaveOptions) -> int:
    """Return the size of the arena to allocate ahead of a plan that is expected to need `size` bytes.

    The margin is for later plans: blocks get other owners when tensors are added.
    """
    return size + min(size, options.block_bytes) + size // 50


def _sources(collected: Collected, spans: list[ArenaSpan], group_of: Mapping[str, str]) -> list[CaptureSource]:
    """Return the item and part that each span of the arena is copied from."""
    by_box: dict[tuple[str, str, Any], tuple[int, int]] = {}
    for number, item in enumerate(collected.items):
        for index, part in enumerate(item.holder.parts):
            by_box.setdefault((item.group, item.key, part.box), (number, index))
    sources = []
    for span in spans:
        number, index = by_box[group_of[span.place.file], span.place.spec.key, span.held]
        sources.append(CaptureSource(number, index, span, collected.items[number].holder.local.device))
    return sources
