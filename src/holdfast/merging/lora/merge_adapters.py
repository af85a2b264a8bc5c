"""A merge of adapters from start to end: open base and adapters, match them, stream the merged model, publish."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.computed import ComputedTensors
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.publish_output import Hold, Watch, no_watch, publish_output
from holdfast.convert.run import stream_output
from holdfast.convert.select import is_model
from holdfast.convert.sidefiles import side_files
from holdfast.convert.sinks import sink_named
from holdfast.convert.sinks.base import Output, SinkRequest
from holdfast.core import limits, names
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.core.ranks import Ranks, SingleProcess, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.format import strictjson
from holdfast.merging.donor_files import RECORD, with_fields
from holdfast.merging.input_digests import DigestedFiles, InputDigests
from holdfast.merging.lora.adapter import Adapter
from holdfast.merging.lora.borrowed_files import BorrowedFile
from holdfast.merging.lora.lora_plan import LoraPlan, plan_lora
from holdfast.merging.lora.stored_values import not_finite
from holdfast.merging.lora.tied_head import untied_fields
from holdfast.merging.merge_record import not_finite_note
from holdfast.merging.merge_stream import one_thread_per_operation, thread_count
from holdfast.plan.contents import Contents, Group
from holdfast.sources import open_source
from holdfast.sources.foreign import Foreign, with_contents
from holdfast.version import __version__

BLOCK_BYTES = 8 * limits.MIB
_CONFIG = "config.json"
_TOKENIZER = re.compile(
    r"tokenizer.*|vocab\..*|merges\.txt|added_tokens\.json|special_tokens_map\.json|.*\.jinja|spiece\.model"
)


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The base, the adapters with their weights, and the output of a merge of adapters."""

    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    base: str | None = None
    max_shard_size: int | str = "5GB"
    verify: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        if not self.adapters:
            raise InvalidArgument("a merge of adapters needs at least one adapter")
        if len(self.weights) != len(self.adapters):
            raise InvalidArgument(
                f"expected one weight for each of the {len(self.adapters)} adapters, got {len(self.weights)}"
            )
        for weight in self.weights:
            if not math.isfinite(weight):
                raise InvalidArgument(f"weight: expected a finite number, got {weight}")


@dataclass(frozen=True, slots=True)
class MergedAdapters:
    """The result of a merge of adapters. `changed` are the keys of the weights that the adapters changed."""

    path: str
    base: str
    adapters: int
    changed: tuple[str, ...]
    tensors: int
    files: int
    bytes: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoraForecast:
    """The plan of a merge of adapters, from headers. The fields are part of `--json`."""

    base: str
    adapters: tuple[str, ...]
    changed: tuple[str, ...]
    tensors: int
    files: int
    bytes: int
    notes: tuple[str, ...]


class PreparedLoraMerge:
    """A merge of adapters whose inputs are open and whose output is planned. No tensor has been read."""

    step = None

    def __init__(self, options: LoraOptions) -> None:
        self.options = options
        self.adapters = [
            Adapter(path, number, weight)
            for number, (path, weight) in enumerate(zip(options.adapters, options.weights, strict=True))
        ]
        self.base = _open_base(options, self.adapters)
        self.group_name, group = base_group(self.base)
        computed = ComputedTensors(self.base, _adapter_files(self.adapters))
        self.plan = plan_lora(self.base, group, self.adapters, computed)
        self._computed = computed
        self._not_finite: dict[str, int] = {}
        self.source = self._virtual_source(group, computed)
        self._record = b""
        self._notes: list[str] = []
        contents = Contents({"model": self.source.contents.groups["model"]}, ())
        request = SinkRequest(
            max_shard_bytes=limits.parse_bytes(options.max_shard_size),
            block_bytes=BLOCK_BYTES,
            side_files=self._side_files(),
        )
        output = sink_named("hf")(contents, request)
        self.output = Output(
            output.files, lambda name, reports: {**output.small_files(name, reports), RECORD: self._record}
        )
        for adapter in self.adapters:
            if adapter.copies:
                self._notes.append(f"{adapter.path}: PEFT's copies were not needed: {', '.join(adapter.copies)}")
        self._notes[:0] = [*output.notes, *self.plan.notes]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user. Elements that are not finite are known once the tensors were written."""
        return (*self._notes, *([not_finite_note(self._not_finite)] if self._not_finite else ()))

    def forecast(self) -> LoraForecast:
        """Return what the merge will write."""
        return LoraForecast(
            base=str(self.base.path),
            adapters=tuple(adapter.path for adapter in self.adapters),
            changed=self.plan.changed,
            tensors=len(self.plan.tensors),
            files=len(self.output.files),
            bytes=self.output.bytes,
            notes=self.notes,
        )

    def _virtual_source(self, group: Group, computed: ComputedTensors) -> Foreign:
        """Return the base with merged weights in place of its own."""
        files = _adapter_files(self.adapters)
        stored = [file for adapter in self.adapters for file in adapter.borrowed.stored]
        every = (*self.base.contents.files, *stored, *computed.stored_files())
        groups = {"model": replace(group, kind="module", tensors=self.plan.tensors, aliases=self.plan.aliases)}
        return with_contents(self.base, Contents(groups, every), {}, {**files, **computed.files})

    def _side_files(self) -> dict[str, bytes]:
        """Return the base's side files. Added tokens bring the adapter's tokenizer, and change the config's size."""
        folder = names.group_folder(names.file_stem(self.group_name, self.base.contents.groups[self.group_name].kind))
        every = {
            name.removeprefix(folder): data for name, data in side_files(self.base).items() if name.startswith(folder)
        }
        files = {name: data for name, data in every.items() if name not in (RECORD, names.ADAPTER_CONFIG)}
        fields = untied_fields(self.base.config() or {}) if self.plan.unties else {}
        if self.plan.vocabulary is not None:
            self._notes.append(f"the vocabulary grew to {self.plan.vocabulary} rows")
            own = [adapter for adapter in self.adapters if any(map(_is_tokenizer, adapter.small))]
            files |= {n: data for a in own for n, data in a.small.items() if _is_tokenizer(n)}
            if own:
                self._notes.append(f"the tokenizer comes from {own[-1].path}, which adds tokens")
        if _CONFIG in files:
            files[_CONFIG] = _with_changed_fields(files[_CONFIG], fields, self.plan)
        return files

    def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> list[BlockReport]:
        """Write this rank's share of the tensor files. Returns the reports of all ranks."""
        digests = InputDigests(self._digested(), ranks)
        written = 0

        def progressed(size: int) -> None:
            nonlocal written
            written += size
            digests.advance(min(1.0, written * ranks.world / self.output.bytes))
            progress(size)

        with closing(digests), one_thread_per_operation():
            reports = stream_output(
                self.source, self.output, BLOCK_BYTES, ranks, attempt, progressed, verify=self.options.verify
            )
            self._not_finite = self._count_not_finite(ranks)
            self._record = self._written_record(digests.collect(thread_count(ranks)))
        return reports

    def _count_not_finite(self, ranks: Ranks) -> dict[str, int]:
        """Return how many elements of each changed tensor are NaN or infinite, if any are."""
        whole = [key for key in self.plan.changed if key not in self.plan.computed][ranks.rank :: ranks.world]

        def count() -> dict[str, dict[int, int]]:
            found = {key: {0: not_finite(self.plan.tensors[key], self._computed)} for key in whole}
            return found | {key: dict(weight.not_finite) for key, weight in self.plan.computed.items()}

        bands: dict[str, dict[int, int]] = {}
        for answer in run_on_all_ranks(ranks, count):
            for key, own in answer.items():
                bands.setdefault(key, {}).update(own)  # ranks that share a band count the same elements
        return {key: total for key, own in sorted(bands.items()) if (total := sum(own.values()))}

    def _digested(self) -> list[DigestedFiles]:
        lock = threading.Lock()
        used = {p.file for r in self.base.contents.groups[self.group_name].tensors.values() for p in r.sources()}
        base = DigestedFiles(self.base, lock, tuple(sorted(used)))
        own = [
            DigestedFiles(
                adapter.source, adapter.lock, tuple(sorted(file.file for file in adapter.borrowed.virtual.values()))
            )
            for adapter in self.adapters
        ]
        return [base, *own]

    def _written_record(self, digests: Sequence[Mapping[str, str]]) -> bytes:
        adapters = [
            {
                "path": adapter.options_path,
                "weight": adapter.weight,
                "step": adapter.source.step,
                "digests": dict(files),
            }
            for adapter, files in zip(self.adapters, digests[1:], strict=True)
        ]
        record = {
            "holdfast": __version__,
            "method": "lora",
            "base": {"path": str(self.base.path), "step": self.base.step, "digests": dict(digests[0])},
            "adapters": adapters,
            "changed": len(self.plan.changed),
            "tensors": len(self.plan.tensors),
            "not_finite": self._not_finite,
            "notes": list(self.notes),
        }
        return (json.dumps(record, indent=2) + "\n").encode()


def _adapter_files(adapters: Sequence[Adapter]) -> dict[str, BorrowedFile]:
    return {name: file for adapter in adapters for name, file in adapter.borrowed.virtual.items()}


def _is_tokenizer(name: str) -> bool:
    return _TOKENIZER.fullmatch(name) is not None


def _open_base(options: LoraOptions, adapters: Sequence[Adapter]) -> Checkpoint:
    """Open the base: the given one, or the one that an adapter names."""
    if options.base is not None:
        return open_source(options.base)
    for adapter in adapters:
        path = adapter.base_path()
        if path is not None:
            return open_source(path)
    raise NotFound(
        f"{adapters[0].path} does not name a base model on this host; name it: `holdfast merge BASE DST --lora ADAPTER`"
    )


def base_group(base: Checkpoint) -> tuple[str, Group]:
    """Return the group of the whole model, with its name. Raises NotFound unless there is one."""
    if isinstance(base, Foreign) and base.partial is not None:
        raise Unsupported(f"{base.path} cannot be merged: it is {base.partial}")
    groups = base.contents.groups
    found = {
        n: g for n, g in groups.items() if is_model(n, g) and g.kind != names.ADAPTER and not n.endswith(".buffers")
    }
    bases = {name: group for name, group in found.items() if group.kind == names.BASE}
    chosen = bases or ({"model": found["model"]} if "model" in found else found)
    if len(chosen) != 1:
        actual = ", ".join(f"{name} ({group.kind})" for name, group in groups.items()) or "nothing"
        raise NotFound(f"{base.path}: expected one model as the base, found {actual}")
    return next(iter(chosen.items()))


def _with_changed_fields(data: bytes, changed: Mapping[str, object], plan: LoraPlan) -> bytes:
    """Return a config with changed fields, and the new number of rows where it states one.

    A composite model states it for its text.
    """
    fields = dict(changed)
    config = strictjson.loads(data, _CONFIG)
    if plan.vocabulary is not None and isinstance(config, dict):
        text = fields.get("text_config", config.get("text_config"))
        if isinstance(text, dict) and "vocab_size" in text:
            fields["text_config"] = {**text, "vocab_size": plan.vocabulary}
        if "vocab_size" in config or "text_config" not in fields:
            fields["vocab_size"] = plan.vocabulary
    return with_fields(data, _CONFIG, fields)


def run_lora_merge(
    options: LoraOptions,
    destination: str | os.PathLike[str],
    ranks: Ranks | None = None,
    watch: Watch = no_watch,
) -> MergedAdapters:
    """Merge adapters into their base, as a folder that `from_pretrained` opens. The destination appears atomically.

    Collective: every rank must call it, merges a share, and raises the same error as the others.
    """
    ranks = SingleProcess() if ranks is None else ranks
    start = time.monotonic()

    def plan(target: DestinationFolder, hold: Hold) -> PreparedLoraMerge:
        target.check_free(force=options.force)
        merge = PreparedLoraMerge(options)
        for source in (merge.base, *(adapter.source for adapter in merge.adapters)):
            hold(source)
        return merge

    merge, target = publish_output(plan, destination, ranks, watch, force=options.force)
    files = target.storage.files(target.folder)
    return MergedAdapters(
        target.path,
        merge.base.path,
        len(merge.adapters),
        merge.plan.changed,
        len(merge.plan.tensors),
        len(files),
        sum(files.values()),
        time.monotonic() - start,
        merge.notes,
    )
