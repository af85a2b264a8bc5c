"""A load, collective: open, wants, fit, plan of the reads, read, place, report. Begin with `load_checkpoint`.

    open     Checkpoint   every rank opens the checkpoint, and holds it against retention
    wants    LoadWants    each rank matches its live state with the checkpoint; all ranks compare
    fit      Fit          missing, unexpected and mismatched keys: a strict load raises here
    plan     ReadPlan     the byte ranges that this host reads, each once, or once for all hosts
    read     Loaded       bytes are verified and copied into the live tensors
    place    Placement    values that are not filled in place are assigned, hooks run
    report   LoadReport

Up to the fit nothing of the live state is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.reading import MAP_BYTES, MEMORY_PORTION_BYTES, PORTION_BYTES, Loaded, Loading
from holdfast.core.clock import PhaseClock
from holdfast.core.collector import paused_collector
from holdfast.core.errors import Mismatch
from holdfast.core.events import Event, Listener, ignore_event
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.engine.load_progress import watched
from holdfast.engine.load_report import LoadReport
from holdfast.engine.load_wants import Fit, LoadWants, check_fit, collect_wants
from holdfast.engine.options import LoadOptions
from holdfast.engine.read_once import ReadOnce, choose_read_once
from holdfast.layout.box import Box
from holdfast.plan.contents import Contents
from holdfast.plan.load_plan import Read, Want, plan_load
from holdfast.plan.passing import SharedWants
from holdfast.plan.staging import Staging, portion_bytes_within


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads of this host, and its ranks. Each rank reads for itself if it has the files mapped or in memory.

    With `once` the reads are those of all hosts: each byte is read once and passed on.
    """

    reads: tuple[Read, ...]
    neighbors: tuple[int, ...]
    is_local: bool
    reason: str = ""  # why hosts read apart, or once for all
    once: ReadOnce | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The keys that post-hooks of modules left as missing or unexpected, and notes for the user."""

    missing: Sequence[str]
    unexpected: Sequence[str]
    notes: Sequence[str] = ()

    @staticmethod
    def merged(placements: Sequence[Placement]) -> Placement:
        """Return the keys and notes of all ranks, each once and in order."""

        def union(texts: Iterable[Sequence[str]]) -> tuple[str, ...]:
            return tuple(sorted(set().union(*texts)))

        return Placement(
            union(placement.missing for placement in placements),
            union(placement.unexpected for placement in placements),
            union(placement.notes for placement in placements),
        )


def load_checkpoint(
    ranks: Ranks,
    opener: Callable[[], Checkpoint],
    state: MutableMapping[str, Any],
    options: LoadOptions,
    progress: Progress | None = None,
    *,
    deadline_s: float,
    touched: set[str] | None = None,
    listener: Listener = ignore_event,
) -> LoadReport:
    """Load a checkpoint into the live state.

    Without `progress` rank 0 shows a bar if it has a terminal. `touched` receives the names of the
    groups that any rank has overwritten, also if the load fails.
    """
    from holdfast.capture.capturer import wait_for_captures

    clock = PhaseClock()
    wait_for_captures()
    with ExitStack() as held:

        def open_held() -> Checkpoint:
            checkpoint = opener()
            held.enter_context(checkpoint.held())
            return checkpoint

        with paused_collector():
            wants = collect_wants(ranks, open_held, state, options)
            fit = check_fit(wants, options)
            plan = _plan_reads(ranks, wants, options)
            clock.end("plan")
            step = wants.checkpoint.step
            listener(Event("load planned", step, ranks.rank, seconds=clock.seconds["plan"]))
            loaded = _read(ranks, wants, plan, progress, options, deadline_s, listener)
        clock.end("read")
        if loaded.failure is None:
            listener(Event("read", step, ranks.rank, loaded.read_bytes, clock.seconds["read"], plan.reason))
        if touched is not None:
            touched.update(*ranks.gather(_groups_of(wants.contents, loaded.touched)))
        placement = _place(ranks, wants, fit, loaded)
        if options.strict:
            _require_placed(wants.checkpoint.path, placement)
        clock.end("place")
        return _report(wants, fit, plan, loaded, placement, options, clock)


def _plan_reads(ranks: Ranks, wants: LoadWants, options: LoadOptions) -> ReadPlan:
    """Plan the reads of this host from the wants of its ranks, or those of all hosts if bytes are passed on."""
    hosts, files = wants.hosts, wants.contents.files
    neighbors = tuple(rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank])
    in_memory = wants.checkpoint.in_memory
    is_local = in_memory or wants.mappable
    portion_bytes = PORTION_BYTES
    if is_local:
        largest_bytes = MEMORY_PORTION_BYTES if in_memory else MAP_BYTES
        portion_bytes = portion_bytes_within(options.memory_limit_bytes, len(neighbors), largest_bytes)
    reads = plan_load(files, list(_wanted(wants, neighbors)), verify=options.verify, portion_bytes=portion_bytes)
    if len(set(hosts)) == 1:
        return ReadPlan(reads, neighbors, is_local)
    if options.read_once is False:
        return ReadPlan(reads, neighbors, is_local, "every host reads what it needs, as requested")
    shared = SharedWants(_wanted(wants, range(ranks.world)), hosts)
    once, reason = choose_read_once(ranks, wants, reads, shared, options)
    if once is None:
        return ReadPlan(reads, neighbors, is_local, reason)
    return ReadPlan(once.plan.reads, neighbors, is_local=False, reason=reason, once=once)


def _wanted(wants: LoadWants, ranks: Iterable[int]) -> Iterator[Want]:
    places = {(place.file, place.spec.key): place for file in wants.contents.files for place in file.places}
    for rank in ranks:
        for file, key, boxes in wants.ranks[rank].boxes:
            place = places[file, key]
            dims = len(place.spec.shape)
            yield from (Want(place, Box(tuple(box[:dims]), tuple(box[dims:])), rank) for box in boxes)


def _read(
    ranks: Ranks,
    wants: LoadWants,
    plan: ReadPlan,
    progress: Progress | None,
    options: LoadOptions,
    deadline_s: float,
    listener: Listener,
) -> Loaded:
    """Read, verify and copy into the live tensors. The first failure is in the result: all ranks finish first."""
    from holdfast.adapters.loading.device_staging import staging_for

    requests = wants.targets.requests

    def make_staging() -> Staging:
        return staging_for(requests.devices, options.memory_limit_bytes, len(plan.neighbors))

    checkpoint, own = wants.checkpoint, sum(read.bytes for read in plan.reads if read.reader == ranks.rank)
    label = f"loading {checkpoint.path.rpartition('/')[2]}"
    with watched(progress, listener, label, checkpoint.step, ranks.rank, own) as count:
        loading = Loading(ranks, checkpoint, requests.destinations, count, make_staging)
        if plan.once is not None:
            return loading.run_passed(plan.once.plan, plan.once.links)
        if plan.is_local:
            return loading.run_local(plan.reads)
        return loading.run_read(plan.reads, plan.neighbors, deadline_s)


def _groups_of(contents: Contents, files: Collection[str]) -> list[str]:
    """Return the groups that have tensors in these files."""
    out = []
    for name, group in contents.groups.items():
        if any(place.file in files for recipe in group.tensors.values() for place in recipe.sources()):
            out.append(name)
    return out


def _place(ranks: Ranks, wants: LoadWants, fit: Fit, loaded: Loaded) -> Placement:
    """Assign values that are not filled in place, once every rank has read; raises a failure to read."""
    from holdfast.adapters.loading.module_targets import Incompatible

    def has_actions() -> bool:
        if loaded.failure is not None:
            raise loaded.failure
        return wants.targets.has_actions

    if not any(run_on_all_ranks(ranks, has_actions)):
        return Placement(fit.missing, fit.unexpected)

    def finish() -> dict[str, Any]:
        incompatible = Incompatible(list(fit.missing), list(fit.unexpected))
        notes = wants.targets.finish(incompatible)
        return asdict(Placement(incompatible.missing, incompatible.unexpected, notes))

    return Placement.merged([Placement(**fields) for fields in run_on_all_ranks(ranks, finish)])


def _require_placed(path: str, placement: Placement) -> None:
    texts = [f"missing: {text}" for text in placement.missing]
    texts += [f"unexpected: {text}" for text in placement.unexpected]
    if texts:
        raise Mismatch(
            f"{path} was loaded, but load_state_dict post-hooks of the modules say:\n  " + "\n  ".join(texts)
        )


def _report(
    wants: LoadWants,
    fit: Fit,
    plan: ReadPlan,
    loaded: Loaded,
    placement: Placement,
    options: LoadOptions,
    clock: PhaseClock,
) -> LoadReport:
    checkpoint, destinations = wants.checkpoint, wants.targets.requests.destinations
    return LoadReport(
        step=checkpoint.step,
        path=checkpoint.path,
        loaded=fit.loaded,
        missing=tuple(placement.missing),
        unexpected=tuple(placement.unexpected),
        mismatched=fit.mismatched,
        cast=fit.cast,
        notes=(*placement.notes, *wants.targets.base_notes, *checkpoint.notes),
        values=wants.targets.values,
        verified=options.verify and all(read.digest is not None for read in plan.reads),
        needed_bytes=sum(box.volume * place.spec.dtype.bytes for place, box in destinations),
        read_bytes=loaded.read_bytes,
        seconds=clock.total_s,
        non_persistent=fit.non_persistent,
        computed=fit.computed,
        on_meta=fit.on_meta,
        names=wants.names.kept,
        reading=plan.reason,
        phases=clock.seconds,
    )
