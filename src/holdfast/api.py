"""The public functions `save`, `load` and `open` for one checkpoint, and the step recorded in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.core import limits
from holdfast.core.durations import parse_seconds
from holdfast.core.errors import InvalidArgument
from holdfast.core.names import folder_step
from holdfast.core.ranks import raise_on_all_ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.blocking_save import BlockingSaver
from holdfast.engine.caller_ranks import ranks_of_call
from holdfast.engine.extra_files import ExtraFiles, read_files
from holdfast.engine.load import load_checkpoint
from holdfast.engine.load_report import LoadReport
from holdfast.engine.options import DEADLINE_S, LoadOptions, SaveOptions, check_progress
from holdfast.mapping.per_module import MappingLike
from holdfast.program.model_program import Program
from holdfast.sources import open_stored
from holdfast.sources.paddle.optimizer_names import as_torch
from holdfast.storage import locate, refuse_link


def save(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    step: int | None = None,
    mapping: MappingLike | Mapping[str, MappingLike] | None = None,
    hub_keys: bool = True,
    max_shard_size: int | str = "5GB",
    block_bytes: int = limits.BLOCK_BYTES,
    model_dtype: str | None = None,
    ties: Mapping[str, str] | None = None,
    replicas: str = "error",
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    mesh: Any = None,
    files: ExtraFiles | None = None,
    base: str | None = None,
    program: Program | None = None,
    deadline_s: float = DEADLINE_S,
) -> Checkpoint:
    """Save a state as one checkpoint folder, durable on return; `path` may be an `s3://` address.

    Collective when torch.distributed is initialized: every rank calls it, with its own
    live objects and the same path. `step` is recorded in the manifest; without it, it is that of the folder's name, if
    it has one (`step-40`). `max_shard_size` limits a tensor file, `block_bytes` is how many bytes one digest covers.
    `model_dtype` rounds the model and saves fp32 master weights
    as well. `replicas="first"` saves the first rank's copy where copies of a parameter differ; by default that is a
    LayoutError. `ties` maps keys to the keys they are copies of, where the model does not know. `mesh`
    is the DeviceMesh whose coordinates index values that differ between ranks. `mapping` defines
    the names and shapes of the live tensors in the file: statements, a file of them, or the name of
    a built-in mapping; with several modules, a dict of mappings by name. Without one, `hub_keys` gives the
    tensors of a transformers model the names that its save_pretrained writes. `files` are published with the
    checkpoint, such as a tokenizer: contents by name (bytes, text, or a `Path`), or a function that
    fills a folder, such as `tokenizer.save_pretrained`; those of rank 0. `only` and `ignore` are patterns of keys,
    as in `load`: what they leave out is not in the checkpoint. A model that is not saved whole gets no config.json.
    `base` is how the base model of PEFT adapters is stored: "reference" records where it is, the default if it
    came from a folder or the hub; "full" writes it, and "none" writes only the adapters. `program` is the model as a
    program, from `holdfast.export_program`: it is published with the weights, and `holdfast.load_program` runs it.
    Ranks wait for each other for `deadline_s` seconds at most.

    Raises the same HoldfastError on every rank; an earlier checkpoint at `path` is then unchanged: InvalidArgument for
    an option, Unsupported for a value that cannot be represented, LayoutError if the ranks hold no consistent state,
    StorageError if the storage fails, TimedOut or PeerFailed if another rank does not come or fails.
    """
    ranks = ranks_of_call("holdfast.save", deadline_s)
    made: list[tuple[BlockingSaver, str, Mapping[str, bytes]]] = []

    def prepare() -> None:
        options = SaveOptions(
            max_shard_size=max_shard_size,
            block_bytes=block_bytes,
            model_dtype=model_dtype,
            ties=ties or {},
            replicas=replicas,
            mesh=mesh,
            mapping=mapping,
            only=only,
            ignore=ignore,
            base=base,
            hub_keys=hub_keys,
            program=program,
        )
        storage, folder = locate(path)
        refuse_link(storage, folder)
        extra = read_files(files, state) if files is not None and ranks.rank == 0 else {}
        made.append((BlockingSaver(storage, options), folder, extra))

    run_on_all_ranks(ranks, prepare)
    saver, folder, extra = made[0]
    return saver.save(ranks, folder, state, Lineage(_step_at(folder, step)), extra)


def _step_at(folder: str, step: int | None) -> int | None:
    """Return the step of a checkpoint. A folder with a step's name must hold that step, or a run rejects it."""
    named = folder_step(folder)
    if step is not None and named is not None and step != named:
        raise InvalidArgument(f"step={step}, and the folder {folder} is that of step {named}")
    return named if step is None else step


def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    mapping: MappingLike | Mapping[str, MappingLike] | None = None,
    hub_keys: bool = True,
    strict: bool = True,
    verify: bool = True,
    cast: bool = False,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    mesh: Any = None,
    device: Any = None,
    memory_bytes: int | str = limits.LOAD_MEMORY_BYTES,
    read_once: bool | str | Mapping[str, int | str] = "auto",
    progress: Callable[[int], None] | None = None,
    deadline_s: float = DEADLINE_S,
) -> LoadReport:
    """Load a checkpoint into live objects, in place, whatever layout wrote it.

    `strict` raises a Mismatch that lists every missing and unexpected key and every shape
    and dtype that differs. Otherwise they are in the report, with a warning if part of
    the state was not filled, and a Mismatch if nothing was. `only` and `ignore` are
    patterns of keys. `cast` allows conversion of dtypes. `verify` checks the digest of
    every block that is read. `mapping` defines how the stored tensors become the live ones: statements,
    a file of them, or the name of a built-in mapping. Without one, names follow the checkpoint's own record, and
    `hub_keys` loads files of other tools into a transformers model as its from_pretrained does.
    `memory_bytes` bounds the memory that each rank uses
    beside the tensors. `read_once` lets one host read what several hosts need and pass it on: "auto" measures
    whether that is faster; True and False decide; {"storage": "2GB", "network": "10GB"} gives the bytes per
    second of a host. `progress` is called with the bytes of each read; without it rank 0 shows a bar if
    it has a terminal. Tensors on the meta device are made on `device`, by default on the device type of their mesh,
    else on torch's default device; their modules compute buffers that no checkpoint holds. No tensor is changed
    before everything is known to fit. `ties`, `mesh` and `deadline_s` are those of `save`. Collective, as `save` is.

    Raises the same HoldfastError on every rank: NotFound if there is no checkpoint, Mismatch if it does not fit the
    state, Damaged if a digest, a header or the manifest is wrong, Unsupported for a newer or unknown format.
    """
    ranks = ranks_of_call("holdfast.load", parse_seconds(deadline_s, "deadline_s"))

    def check() -> LoadOptions:
        check_progress(progress)
        return LoadOptions(
            strict=strict,
            verify=verify,
            cast=cast,
            only=only,
            ignore=ignore,
            ties=ties or {},
            mesh=mesh,
            mapping=mapping,
            device=device,
            hub_keys=hub_keys,
            memory_bytes=memory_bytes,
            read_once=read_once,
        )

    options = raise_on_all_ranks(ranks, check)

    def opener() -> Checkpoint:
        return as_torch(open_stored(path))

    report = load_checkpoint(ranks, opener, state, options, progress, deadline_s=deadline_s)
    if ranks.rank == 0 and (report.missing or report.mismatched):
        warn(f"not all of the state was loaded: {report}")
    return report


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint for reading, without a process group and without torch.

    Reads Holdfast checkpoints and those of other tools: Hugging Face folders, torch DCP,
    `.pt` and `.bin` files, Paddle's unified and flex checkpoints, `.pdparams`, `.pdiparams` and the programs beside
    them (`.json`). Tensors are read when they are asked for. Raises NotFound, Damaged, or Unsupported for a newer or
    unknown format.
    """
    return open_stored(path)
