"""The way of a conversion: open, map, lay out, stream, publish. Collective over all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.checkpoint import Checkpoint, no_progress
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.equal_scalars import require_same
from holdfast.checkpoint.publish import new_attempt
from holdfast.checkpoint.reading import Progress
from holdfast.convert.boxes_for_sink import Pull
from holdfast.convert.check_transposes import check_orientation
from holdfast.convert.destination import Destination
from holdfast.convert.mapping import MappingOptions, config_of, explained, mapped
from holdfast.convert.open_source import open_source
from holdfast.convert.paddle_linears import (
    PADDLE_FORMATS,
    Oriented,
    check_mapped,
    hub_oriented,
    is_in_out,
    is_known,
)
from holdfast.convert.plans import kept_plans, plans_without_place
from holdfast.convert.select import cast_models, check_scales_stay, chosen, model_dtype
from holdfast.convert.sidefiles import side_files, with_dtype
from holdfast.convert.sinks import sink_named
from holdfast.convert.sinks.base import Output, Request, Scene
from holdfast.convert.spans import dealt, first_touches, plan_spans
from holdfast.convert.stream import Stream
from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.ranks import Ranks, SingleProcess, run_on_all_ranks
from holdfast.format.names import folder_step
from holdfast.plan.contents import Contents
from holdfast.plan.state_references import update_references
from holdfast.sources.foreign import Foreign
from holdfast.sources.paddle.optimizer_names import as_torch
from holdfast.sources.paddle.to_paddle import as_paddle
from holdfast.sources.raw_bits import as_bfloat16, reject_unknown_uint16
from holdfast.storage.base import SharedStorage, Storage
from holdfast.storage.local import LocalStorage
from holdfast.writer import startup_cleanup
from holdfast.writer.heartbeat import shown

_SILENCE_S = 60.0

Watch = Callable[[int], AbstractContextManager[Progress]]


@contextmanager
def unwatched(total: int) -> Iterator[Progress]:
    """The progress of a conversion that nobody watches."""
    yield no_progress


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What is converted, and to what."""

    to: str = "holdfast"
    dtype: str | None = None
    only: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    max_shard_size: int | str = "5GB"
    block_bytes: int = limits.BLOCK_BYTES
    verify: bool = True
    force: bool = False
    mapping: MappingOptions = field(default_factory=MappingOptions)
    linear_weights: str | None = None  # how those of a source from Paddle are stored: "in-out" or "out-in"
    uint16: str | None = None  # what weights stored as uint16 are: "bfloat16", whose bits they are, or "uint16"


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote."""

    path: str
    format: str
    files: int
    bytes: int
    seconds: float
    notes: tuple[str, ...]
    ready: bool = True  # whether the library that the format is for can open it, as far as the weights are concerned


class Conversion:
    """A source that is laid out for a format: what would be written is known, no tensor has been read."""

    def __init__(self, source: Checkpoint, options: ConvertOptions, step: int | None = None) -> None:
        """`step` is that of the folder to be made; without it the source's step stays."""
        sink = sink_named(options.to)
        if isinstance(source, Foreign) and source.partial is not None:
            raise Unsupported(f"{source.path} is not converted: it is {source.partial}")
        dtype = None if options.dtype is None else model_dtype(options.dtype)
        source = _with_uint16_told(source, options.uint16)
        self.source = as_paddle(source) if options.to == "paddle" else as_torch(source)
        self.options = options
        self._small = small = side_files(source)
        contents, self.same = mapped(self.source.contents, options.mapping, small)
        if options.to == "paddle":
            check_orientation(self.source.contents, contents)
        oriented = self._oriented(contents)
        contents, self.ready = oriented.contents, oriented.ready
        plans, self._notes = kept_plans(source.manifest.plans, self.source.contents, contents)
        every = contents.groups
        taken = chosen(contents, options.only, options.remove, self.source.contents)
        check_scales_stay(contents, taken)
        contents = update_references(taken)
        contents = contents if dtype is None else cast_models(contents, dtype, every)
        self.contents = contents if step is None else replace(contents, step=step)
        self._notes = (*oriented.notes, *self._notes)
        plans, without_place = plans_without_place(plans, self.contents, options.to)
        self._notes += without_place
        manifest = source.manifest
        request = Request(
            max_shard_bytes=limits.parse_bytes(options.max_shard_size),
            block_bytes=options.block_bytes,
            side_files=with_dtype(small, dtype),
            writer=manifest.writer,
            metrics=manifest.metrics,
            plans=plans,
        )
        self.output: Output = sink(self.contents, request)

    def _oriented(self, contents: Contents) -> Oriented:
        """Return contents with linear weights as the hub has them, if they come from Paddle, or the user says so."""
        options, said = self.options, self.options.linear_weights
        config = config_of(self._small) if options.mapping.config is None else options.mapping.config
        paddle = isinstance(self.source, Foreign) and self.source.format in PADDLE_FORMATS
        if options.to == "paddle" or not (said or isinstance(self.source, Foreign)):
            return Oriented(contents)
        if options.mapping.written is not None and said is None:
            if options.to == "hf" and paddle:
                check_mapped(contents, config)
            return Oriented(contents)
        if not paddle and said is None and not (is_known(config) and is_in_out(contents, config)):
            return Oriented(contents)
        stored = self.source.linear_weights if isinstance(self.source, Foreign) else None
        return hub_oriented(contents, config, options.to, stored, said)

    def explain(self) -> tuple[str, ...]:
        """What the mapping does, a line for each target."""
        return explained(self.source.contents, self.options.mapping, self._small)

    @property
    def bytes(self) -> int:
        """How much the tensor files will take."""
        return sum(file.plan.size for file in self.output.files)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know: what was left out of the source, and what the format cannot hold."""
        of_source = self.source.notes if isinstance(self.source, Foreign) else ()
        return (*of_source, *self.output.notes, *self._notes)

    def write(self, ranks: Ranks, storage: Storage, attempt: str, progress: Progress) -> list[BlockReport]:
        """Write this rank's share of the tensor files; returns the reports of all ranks."""
        run_on_all_ranks(ranks, lambda: require_same(self.source, self.same))
        stored = self.source.contents.files
        if self.output.write is not None:
            run_on_all_ranks(ranks, lambda: self._write_by_sink(ranks, storage, attempt, progress))
            return []
        spans = plan_spans(self.output.files, stored, self.options.block_bytes)
        fresh = first_touches(spans)
        own = dealt(spans, ranks.rank, ranks.world, whole_files=storage.whole_files)
        stream = Stream(self.source, stored, progress, verify=self.options.verify)

        def work() -> list[list[object]]:
            reports = stream.run([spans[n] for n in own], [fresh[n] for n in own], storage, attempt)
            return [[report.file, report.offset, report.size, report.digest] for report in reports]

        answers = run_on_all_ranks(ranks, work)
        return [BlockReport(*report) for answer in answers for report in answer]  # type: ignore[arg-type]

    def _write_by_sink(self, ranks: Ranks, storage: Storage, attempt: str, progress: Progress) -> None:
        assert self.output.write is not None
        if not isinstance(storage, LocalStorage):
            raise Unsupported(f"{storage.name}: the format {self.options.to} can be written to a local folder only")
        pull = Pull(self.source, self.source.contents.files, verify=self.options.verify)
        with pull.running():
            self.output.write(Scene(ranks, storage.root / attempt, pull.read, progress))


def _with_uint16_told(source: Checkpoint, meaning: str | None) -> Checkpoint:
    """Return the source with its uint16 weights as what the user says they are; raises where nobody says it."""
    if meaning not in (None, "uint16", "bfloat16"):
        raise InvalidArgument(f"--uint16 {meaning}: weights stored as uint16 are bfloat16 or uint16")
    if meaning is None:
        reject_unknown_uint16(source)
    return as_bfloat16(source) if meaning == "bfloat16" else source


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    options: ConvertOptions,
    ranks: Ranks | None = None,
    watch: Watch = unwatched,
) -> Converted:
    """Convert a checkpoint of any format that Holdfast reads; the folder appears whole or not at all.

    Collective: every rank calls it and does its share of the work, or raises the same error.
    """
    ranks = SingleProcess() if ranks is None else ranks
    began = time.monotonic()
    made: list[tuple[Conversion, Destination]] = []
    with ExitStack() as stack:

        def prepare() -> None:
            place = Destination.at(destination)
            opened = open_source(source)
            place.check(opened, force=options.force)
            stack.enter_context(opened.held())
            made.append((Conversion(opened, options, folder_step(place.folder)), place))

        run_on_all_ranks(ranks, prepare)
        conversion, place = made[0]
        progress = stack.enter_context(watch(conversion.bytes))
        _write(conversion, ranks, place, progress)
    files = place.storage.files(place.folder)
    seconds = time.monotonic() - began
    total = sum(files.values())
    return Converted(place.path, options.to, len(files), total, seconds, conversion.notes, conversion.ready)


def _write(conversion: Conversion, ranks: Ranks, place: Destination, progress: Progress) -> None:
    """Write an attempt and publish it; on any failure nothing is left of it."""
    storage = place.storage
    with ExitStack() as stack:
        attempt = _begin(conversion, ranks, storage, stack)

        def publish(reports: Sequence[BlockReport]) -> None:
            if ranks.rank:
                return
            for name, data in conversion.output.small_files(attempt, reports).items():
                storage.put(attempt, name, data)
            place.check_free(force=conversion.options.force)  # again: it took a while
            storage.publish(attempt, place.folder)

        try:
            reports = conversion.write(ranks, storage, attempt, progress)
            run_on_all_ranks(ranks, lambda: publish(reports))
        except BaseException:
            if ranks.rank == 0:
                storage.discard(attempt)
            raise


def _begin(conversion: Conversion, ranks: Ranks, storage: SharedStorage, stack: ExitStack) -> str:
    """Rank 0 sweeps what dead attempts left and makes a new one; the others learn its name."""
    attempt = new_attempt()

    def work() -> str | None:
        if ranks.rank:
            return None
        if storage.exists():
            startup_cleanup.clean_storage(storage, startup_cleanup.dead_attempts(storage, _SILENCE_S))
        files = conversion.output.files if conversion.output.write is None else ()
        begun = {"step": conversion.contents.step, "world": ranks.world, "bytes": conversion.bytes}
        stack.enter_context(shown(storage, attempt, begun))
        storage.begin(attempt)
        for file in files:
            storage.create(attempt, file.plan.name, file.plan.size)
        return attempt

    try:
        return str(run_on_all_ranks(ranks, work)[0])
    except BaseException:
        if ranks.rank == 0:
            storage.discard(attempt)
        raise
