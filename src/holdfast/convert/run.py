"""A conversion from start to end: options, open, map, orient, lay out, write on all ranks, publish."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.equal_scalars import require_same
from holdfast.convert.boxes_for_sink import BoxReader
from holdfast.convert.carried_program import carry_program
from holdfast.convert.check_model import check_model, unknown_names
from holdfast.convert.check_transposes import check_transposes
from holdfast.convert.config_from_args import with_config_from_args
from holdfast.convert.dequantize import Recoded, dequantized
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.mapping import (
    MappingOptions,
    config_of,
    explain_mapping,
    has_args,
    makes_hub_names,
    map_source,
)
from holdfast.convert.megatron_names import has_megatron_names, mapping_hint
from holdfast.convert.paddle_linears import (
    PADDLE_FORMATS,
    OrientedContents,
    check_mapped,
    hub_oriented,
    is_in_out,
    is_known,
)
from holdfast.convert.plans import kept_mappings, kept_plans, plans_for_format
from holdfast.convert.publish_output import Hold, Watch, no_watch, publish_output
from holdfast.convert.quantize import QuantizeOptions, quantized
from holdfast.convert.select import cast_models, check_scales_kept, model_dtype, select_contents
from holdfast.convert.sidefiles import side_files, with_config, with_dtype
from holdfast.convert.sinks import sink_named
from holdfast.convert.sinks.base import Output, SinkContext, SinkRequest
from holdfast.convert.sinks.hf import NO_CONFIG
from holdfast.convert.spans import first_touches, plan_spans, spans_of_rank
from holdfast.convert.stream import ConversionStream
from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.names import folder_step
from holdfast.core.ranks import Ranks, SingleProcess, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.plan.contents import Contents
from holdfast.plan.state_references import update_references
from holdfast.sources import open_source
from holdfast.sources.foreign import Foreign
from holdfast.sources.paddle.optimizer_names import as_torch
from holdfast.sources.paddle.to_paddle import as_paddle
from holdfast.sources.raw_bits import as_bfloat16, reject_unknown_uint16
from holdfast.storage.local import LocalStorage

_COMPARING = "comparing with transformers' model"
_IMPORTING = "importing torch"
_SHORT_S = 0.5  # shorter waits count as a part of the conversion
T = TypeVar("T")
_UNOPENED = "names as they are in the source, with which from_pretrained opens nothing: config.json is left out"


def _ignore(text: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The selection, the mapping and the format of a conversion."""

    to: str = "holdfast"
    dtype: str | None = None
    only: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    max_shard_size: int | str = "5GB"
    block_bytes: int = limits.BLOCK_BYTES
    verify: bool = True
    force: bool = False
    mapping: MappingOptions = field(default_factory=MappingOptions)
    linear_weights: str | None = None  # their order in a Paddle source: "in-out" or "out-in"
    keep_names: bool = False  # write names that transformers does not know to a Hugging Face folder, without a config
    uint16: str | None = None  # dtype of weights stored as uint16: "bfloat16" (raw bits) or "uint16"
    dequantize: str | None = None  # the dtype of weights that are stored with scales
    quantize: QuantizeOptions | None = None
    on_wait: Callable[[str], None] = _ignore  # called with what takes seconds before anything is written
    recode: Callable[[Checkpoint, Mapping[str, bytes]], Recoded] | None = None  # another change of the source's tensors

    def on_compare(self) -> None:
        self.on_wait(_COMPARING)


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion. `seconds` are without those of `waits`: imports and comparisons ahead of it."""

    path: str
    format: str
    files: int
    bytes: int
    seconds: float
    notes: tuple[str, ...]
    ready: bool = True  # whether the weights fit the format's library
    source: str = ""  # the path of the step that was read
    waits: Mapping[str, float] = field(default_factory=dict)  # seconds, by what took them


class Conversion:
    """A source laid out for a format. The output is planned, and no tensor has been read."""

    def __init__(self, source: Checkpoint, options: ConvertOptions, step: int | None = None) -> None:
        """Plan the conversion. `step` is the step of the destination; None keeps the source's step."""
        sink = sink_named(options.to)
        self.waits: dict[str, float] = {}
        if isinstance(source, Foreign) and source.partial is not None:
            raise Unsupported(f"{source.path} cannot be converted: it is {source.partial}")
        dtype = None if options.dtype is None else model_dtype(options.dtype)
        source = _with_uint16_as(source, options.uint16)
        mapping, made = with_config_from_args(source, side_files(source), options.mapping)
        options = replace(options, mapping=mapping)
        recoded = _recoded(source, with_config(side_files(source), options.to, options.mapping), options)
        self.source = as_paddle(recoded.source) if options.to == "paddle" else as_torch(recoded.source)
        self.options = options
        self._small = small = recoded.files
        mapped = map_source(self.source.contents, options.mapping, small)
        contents, self.same = mapped.contents, mapped.equal_scalars
        if options.to == "paddle":
            check_transposes(self.source.contents, contents)
        oriented = self._oriented(contents)
        contents, self.ready = oriented.contents, oriented.ready
        unknown = self._waiting(_COMPARING, lambda: _unknown_names(source, contents, small, options))
        if unknown is not None and options.to == "hf":
            if not options.keep_names:
                raise Unsupported(f"{unknown} (--keep-names writes the names as they are, without config.json)")
            unknown, self.ready = _UNOPENED, False
            small = {name: data for name, data in small.items() if name != "config.json"}
        unopened = () if unknown is None else (unknown,)
        plans, self._notes = kept_plans(source.manifest.plans, self.source.contents, contents)
        all_groups = contents.groups
        selected = select_contents(contents, options.only, options.remove, self.source.contents)
        check_scales_kept(contents, selected)
        config = config_of(small)
        if options.to == "hf" and config is not None and makes_hub_names(self.source.contents, options.mapping):
            name, model = options.mapping.config_name, config
            self._waiting(_COMPARING, lambda: check_model(contents, selected, model, name, options.on_compare))
        contents = update_references(selected)
        contents = contents if dtype is None else cast_models(contents, dtype, all_groups)
        carried = carry_program(source, contents, options.to)
        self.contents = carried.contents if step is None else replace(carried.contents, step=step)
        self._unopened = unopened
        self._notes = (*made, *recoded.notes, *mapped.notes, *oriented.notes, *self._notes, *carried.notes)
        plans, plan_notes = plans_for_format(plans, self.contents, options.to)
        self._notes += plan_notes
        manifest = source.manifest
        request = SinkRequest(
            max_shard_bytes=limits.parse_bytes(options.max_shard_size),
            block_bytes=options.block_bytes,
            side_files={**with_dtype(small, dtype), **carried.files},
            writer=manifest.writer,
            metrics=manifest.metrics,
            plans=plans,
            bases=manifest.bases,
            mappings=kept_mappings(source.manifest.mappings, source.contents, self.contents),
        )
        self.output: Output = sink(self.contents, request)

    def _oriented(self, contents: Contents) -> OrientedContents:
        """Return contents with the hub's order of linear weights, for a Paddle source or a stated order."""
        options, stated = self.options, self.options.linear_weights
        config = config_of(self._small) if options.mapping.config is None else options.mapping.config
        paddle = isinstance(self.source, Foreign) and self.source.format in PADDLE_FORMATS
        if options.to == "paddle" or not (stated or isinstance(self.source, Foreign)):
            return OrientedContents(contents)
        if options.mapping.written is not None and stated is None:
            if options.to == "hf" and paddle:
                check_mapped(contents, config)
            return OrientedContents(contents)
        if not paddle and stated is None and not (is_known(config) and is_in_out(contents, config)):
            return OrientedContents(contents)
        stored = self.source.linear_weights if isinstance(self.source, Foreign) else None
        return hub_oriented(contents, config, options.to, stored, stated)

    def _waiting(self, label: str, work: Callable[[], T]) -> T:
        """Do work that may take seconds to import a library, report it, and keep the time apart."""
        began = time.monotonic()
        result = work()
        self.waits[label] = self.waits.get(label, 0.0) + time.monotonic() - began
        return result

    def explain(self) -> tuple[str, ...]:
        """Describe the mapping, one line for each target."""
        return explain_mapping(self.source.contents, self.options.mapping, self._small)

    @property
    def step(self) -> int | None:
        """The step of the destination, None without one."""
        return self.contents.step

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: omitted contents of the source, and contents that the format cannot store."""
        source_notes = self.source.notes if isinstance(self.source, Foreign) else ()
        of_sink = (note for note in self.output.notes if not self._unopened or note != NO_CONFIG)
        return (*self._unopened, *source_notes, *of_sink, *self._notes)

    def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> list[BlockReport]:
        """Write this rank's share of the tensor files. Returns the reports of all ranks."""
        run_on_all_ranks(ranks, lambda: require_same(self.source, self.same))
        if self.output.write is not None:
            run_on_all_ranks(ranks, lambda: self._write_by_sink(ranks, attempt, progress))
            return []
        return stream_output(
            self.source, self.output, self.options.block_bytes, ranks, attempt, progress, verify=self.options.verify
        )

    def _write_by_sink(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> None:
        assert self.output.write is not None
        storage = attempt.storage
        if self.output.prepare is not None:
            self.options.on_wait(_IMPORTING)
            self._waiting(_IMPORTING, self.output.prepare)
        if not isinstance(storage, LocalStorage):
            raise Unsupported(f"{storage.name}: the format {self.options.to} can only be written to a local folder")
        reader = BoxReader(self.source, self.source.contents.files, verify=self.options.verify)
        with reader.running():
            self.output.write(SinkContext(ranks, storage.root / attempt.name, reader.read, progress))


def stream_output(
    source: Checkpoint,
    output: Output,
    block_bytes: int,
    ranks: Ranks,
    attempt: Attempt,
    progress: Progress,
    *,
    verify: bool,
) -> list[BlockReport]:
    """Write this rank's share of an output's tensor files from a source. Returns the reports of all ranks."""
    stored = source.contents.files
    virtual = source.virtual_files if isinstance(source, Foreign) else None
    spans = plan_spans(output.files, stored, block_bytes, virtual)
    fresh = first_touches(spans)
    own = spans_of_rank(spans, ranks.rank, ranks.world, whole_files=attempt.storage.whole_files)
    stream = ConversionStream(source, stored, progress, verify=verify)

    def work() -> list[list[Any]]:
        reports = stream.run([spans[n] for n in own], [fresh[n] for n in own], attempt)
        return [report.fields() for report in reports]

    answers = run_on_all_ranks(ranks, work)
    return [BlockReport.from_fields(report) for answer in answers for report in answer]


def _recoded(source: Checkpoint, files: dict[str, bytes], options: ConvertOptions) -> Recoded:
    """Return the source with dequantized or quantized weights, as the options say."""
    given = [name for name in ("dequantize", "quantize", "dtype") if getattr(options, name) is not None]
    if len(given) > 1:
        raise InvalidArgument(f"--{given[0]} and --{given[1]} exclude each other: convert twice, or choose one")
    if options.dequantize is not None:
        return dequantized(source, files, options.dequantize)
    if options.recode is not None:
        return options.recode(source, files)
    if options.quantize is None:
        return Recoded(source, files, ())
    if options.mapping.written is not None or options.to not in ("hf", "holdfast"):
        raise InvalidArgument("--quantize writes the formats hf and holdfast, without a mapping: convert twice")
    return quantized(source, files, options.quantize)


def _unknown_names(
    source: Checkpoint, contents: Contents, small: Mapping[str, bytes], options: ConvertOptions
) -> str | None:
    """Return why transformers cannot open the names of the result, and which mapping gives the hub's; None if it can.

    A Holdfast checkpoint may keep the names of its run.
    """
    mapping, own = options.mapping, config_of(small)
    keys = [key for group in contents.groups.values() for key in group.tensors]
    if not has_megatron_names(keys) or "auto_map" in (own or {}):
        given = own if mapping.written is None and options.to == "hf" and own == mapping.config else None
        return None if given is None else unknown_names(contents, given, mapping.config_name, options.on_compare)
    hint = mapping_hint(keys, own if mapping.config is None else mapping.config, has_args=has_args(contents))
    if options.to == "hf":
        why = "the names are Megatron's, with which from_pretrained would give every weight an initial value"
        return f"{why}: {hint if mapping.written is None else '--to dcp is what Megatron loads'}"
    if mapping.written is None and options.to == "holdfast" and isinstance(source, Foreign):
        return f"for the hub's names: {hint}"
    return None


def _with_uint16_as(source: Checkpoint, dtype: str | None) -> Checkpoint:
    """Return the source with uint16 weights as the dtype that the user gives. Raises if it is needed but missing."""
    if dtype not in (None, "uint16", "bfloat16"):
        raise InvalidArgument(f"--uint16 {dtype}: expected bfloat16 or uint16")
    if dtype is None:
        reject_unknown_uint16(source)
    return as_bfloat16(source) if dtype == "bfloat16" else source


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    options: ConvertOptions,
    ranks: Ranks | None = None,
    watch: Watch = no_watch,
) -> Converted:
    """Convert a checkpoint of any format that Holdfast reads. The destination appears atomically.

    Collective: every rank must call it, converts a share, and raises the same error as the others.
    """
    ranks = SingleProcess() if ranks is None else ranks
    start = time.monotonic()

    def plan(target: DestinationFolder, hold: Hold) -> Conversion:
        opened = open_source(source)
        hold(opened)
        return Conversion(opened, options, folder_step(target.folder))

    conversion, target = publish_output(plan, destination, ranks, watch, force=options.force)
    files = target.storage.files(target.folder)
    waits = {label: seconds for label, seconds in conversion.waits.items() if seconds >= _SHORT_S}
    return Converted(
        target.path,
        options.to,
        len(files),
        sum(files.values()),
        time.monotonic() - start - sum(waits.values()),
        conversion.notes,
        conversion.ready,
        conversion.source.path,
        waits,
    )
