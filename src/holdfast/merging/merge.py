"""A merge from start to end: open the models, match their tensors, merge and write on all ranks, publish."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.publish_output import Hold, Watch, no_watch, publish_output
from holdfast.convert.sinks import sink_named
from holdfast.convert.sinks.base import Output, SinkRequest
from holdfast.core import limits
from holdfast.core.ranks import Ranks, SingleProcess, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.merging.donor_files import RECORD, donor_files
from holdfast.merging.input_digests import DigestedFiles, InputDigests
from holdfast.merging.input_verification import verifying
from holdfast.merging.merge_options import MergeOptions, model_names
from holdfast.merging.merge_plan import MergePlan, plan_merge
from holdfast.merging.merge_record import merge_record, not_finite_note
from holdfast.merging.merge_stream import (
    blocks_of,
    blocks_of_rank,
    one_thread_per_operation,
    thread_count,
    write_blocks,
)
from holdfast.merging.model_input import InputModel
from holdfast.merging.random_masks import draws_of
from holdfast.merging.tensor_scans import scan_tensors
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

BLOCK_BYTES = 8 * limits.MIB  # each thread has one in memory


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge. `removed` are the keys left out by `remove`, and `removed_bytes` their size."""

    path: str
    method: str
    tensors: int
    files: int
    bytes: int
    removed: tuple[str, ...]
    removed_bytes: int
    seconds: float
    notes: tuple[str, ...]


class PreparedMerge:
    """A merge whose models are open and whose output is planned. No tensor has been read."""

    step = None

    def __init__(self, options: MergeOptions) -> None:
        """Open the models and match their tensors. Raises Mismatch if they do not fit together."""
        self.options = options
        chosen = options.all_models
        names = model_names(chosen)
        self.models = tuple(
            InputModel(model, name, number, options.dtype)
            for number, (model, name) in enumerate(zip(chosen, names, strict=True))
        )
        self.plan: MergePlan = plan_merge(options, self.models)
        self._record = b""
        self._not_finite: Counter[str] = Counter()
        donor = self.models[self.plan.donor]
        keys = self.plan.tensors.keys()
        aliases = {alias: key for alias, key in donor.group.aliases.items() if key in keys}
        tensors: dict[str, Recipe[Place]] = {
            key: Recipe(tensor.shape, tensor.dtype, ()) for key, tensor in self.plan.tensors.items()
        }  # a sink asks for the shape and the dtype only
        contents = Contents({donor.group_name: Group("module", tensors, aliases)}, ())
        request = SinkRequest(
            max_shard_bytes=limits.parse_bytes(options.max_shard_size),
            block_bytes=BLOCK_BYTES,
            side_files=donor_files(self.plan),
        )
        self.output: Output = self._with_record(sink_named("hf")(contents, request))

    def _with_record(self, output: Output) -> Output:
        """Return an output whose small files include the record, which is known once the inputs are digested."""
        return Output(output.files, lambda name, reports: {**output.small_files(name, reports), RECORD: self._record})

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes of all files. The record is known once the inputs were digested."""
        small = {name: len(data) for name, data in self.output.small_files("", ()).items()}
        return {**small, **{file.plan.name: file.plan.size for file in self.output.files}}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        removed = self.plan.removed
        lines = [*self.options.notes, *self.output.notes]
        if self.plan.tokens is not None:
            lines.append(self.plan.tokens.note)
        if removed.keys:
            lines.append(f"removed {len(removed.keys)} tensors, {removed.bytes:,} bytes")
        if self._not_finite:
            lines.append(not_finite_note(self._not_finite))
        return tuple(lines)

    def _digested(self) -> list[DigestedFiles]:
        digested = []
        for model in self.models:
            used = {place.file for source in model.tensors.values() for place in source.places(model.number)}
            digested.append(DigestedFiles(model.source, model.lock, tuple(sorted(used))))
        return digested

    def _check_models(self) -> None:
        for model in self.models:
            model.check()

    def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> list[BlockReport]:
        """Write this rank's share of the tensor files. Returns the reports of all ranks."""
        digests = InputDigests(self._digested(), ranks)
        with (
            closing(digests),
            one_thread_per_operation(),
            verifying(self.plan, ranks, enabled=self.options.verify),
        ):
            run_on_all_ranks(ranks, self._check_models)
            draws = draws_of(self.options.rng, self.options.seed, ranks)
            cores = thread_count(ranks)
            threads = 1 if draws.sequential else cores
            scanned = scan_tensors(self.plan, draws, ranks, threads, progress)
            blocks = blocks_of(self.output.files, BLOCK_BYTES)
            own = blocks_of_rank(blocks, ranks, whole_files=attempt.storage.whole_files)

            def work() -> tuple[list[list[object]], dict[str, int]]:
                reports, bad = write_blocks(self.plan, scanned, draws, own, attempt, threads, digests, progress)
                return [report.fields() for report in reports], bad

            answers = run_on_all_ranks(ranks, work)
            for _, bad in answers:
                self._not_finite.update(bad)
            self._record = merge_record(self.options, self.plan, digests.collect(cores), self._not_finite)
        return [BlockReport.from_fields(report) for reports, _ in answers for report in reports]


def run_merge(
    options: MergeOptions,
    destination: str | os.PathLike[str],
    ranks: Ranks | None = None,
    watch: Watch = no_watch,
) -> Merged:
    """Merge models into a folder that `from_pretrained` opens. The destination appears atomically.

    Collective: every rank must call it, merges a share, and raises the same error as the others.
    """
    ranks = SingleProcess() if ranks is None else ranks
    start = time.monotonic()

    def plan(target: DestinationFolder, hold: Hold) -> PreparedMerge:
        target.check_free(force=options.force)  # first, because it takes a moment to match large models
        merge = PreparedMerge(options)
        for model in merge.models:
            hold(model.source)
        return merge

    merge, target = publish_output(plan, destination, ranks, watch, force=options.force)
    sizes = merge.file_sizes()
    removed = merge.plan.removed
    return Merged(
        target.path,
        merge.plan.method.name,
        len(merge.plan.tensors),
        len(sizes),
        sum(sizes.values()),
        removed.keys,
        removed.bytes,
        time.monotonic() - start,
        merge.notes,
    )
