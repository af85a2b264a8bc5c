"""`add_program`: a program for a committed checkpoint, by an atomic exchange of its whole folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from holdfast.checkpoint.attempt import Attempt, check_replaceable, publish
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport, program_records
from holdfast.core.errors import Damaged, InvalidArgument, Mismatch, StorageError
from holdfast.core.names import PROGRAM, PROGRAM_GROUP, index_file
from holdfast.core.ranks import SingleProcess
from holdfast.engine.program_save import StoredWeights, program_bytes, require_weights, stored_program
from holdfast.format.dtypes import dtype_named
from holdfast.format.manifest import FileRecord, Manifest
from holdfast.mapping.program import Mapping
from holdfast.plan.files import TensorSpec
from holdfast.program.graph import CONSTANT
from holdfast.program.model_program import Program
from holdfast.storage import locate, refuse_link
from holdfast.storage.base import Reader, SharedStorage
from holdfast.writer.collective_attempt import collective_attempt
from holdfast.writer.messages import SaveStarted
from holdfast.writer.startup_cleanup import clean_dead_attempts

_THREADS = 4


def add_program(path: str | os.PathLike[str], program: Program) -> Checkpoint:
    """Put a program into a committed checkpoint, or replace the one that it has; return the checkpoint.

    The files are copied, each block verified, into a hidden folder that takes the place of the checkpoint at once, as a
    save of the same step does: a crash at any time leaves the one or the other. Lineage and tags still know the step:
    its manifest keeps the name of the attempt that saved it. The program must be of the module whose weights the
    checkpoint has. Call it on one process. Raises Mismatch if it is of another model, Damaged if a file of
    the checkpoint is, NotFound if there is no checkpoint of Holdfast's; the checkpoint is then as it was.
    """
    if not isinstance(program, Program):
        kind = type(program).__name__
        raise InvalidArgument(f"program={kind}: give what holdfast.export_program(model, example_inputs) returns")
    storage, folder = locate(path)
    refuse_link(storage, folder)
    checkpoint = Checkpoint(storage, folder)
    manifest = checkpoint.manifest
    new = program_bytes(stored_program(program, _weights_of(program, checkpoint)))
    kept = _kept_files(manifest)
    tensors = {name: record for name, record in kept.items() if record.header is not None}
    ranks = SingleProcess()
    begun = SaveStarted(manifest.step, 1, sum(record.size for record in tensors.values()))
    files = [(name, record.size) for name, record in tensors.items()]

    def prepare() -> None:
        if isinstance(storage, SharedStorage):
            clean_dead_attempts(storage)
        check_replaceable(storage, folder)

    with collective_attempt(ranks, storage, folder, files, begun, prepare) as attempt:
        with checkpoint.held():
            _copy(checkpoint, attempt, tensors)
            small = {name: checkpoint.read_file(name) for name in kept if name not in tensors}
        if Checkpoint(storage, folder).manifest != manifest:
            raise StorageError(f"{checkpoint.path} was saved again meanwhile: call add_program once more")
        publish(attempt, _with_program(manifest, attempt.name, kept, new), {**small, **new})
    storage.sweep()
    return Checkpoint(storage, folder)


def _weights_of(program: Program, checkpoint: Checkpoint) -> StoredWeights:
    """Return the weights of the module that the program is of, with their names in memory if these differ."""
    modules = [name for name, group in checkpoint.manifest.groups.items() if group.kind == "module"]
    _refuse_entry(checkpoint)
    found = []
    for group in sorted(modules, key=lambda name: name != program.group):
        shapes = {key: place.spec.shape for key, place in checkpoint.places[group].items()}
        aliases = checkpoint.manifest.groups[group].aliases
        text = checkpoint.manifest.mappings.get(group, "")
        found.append(StoredWeights(group, shapes, aliases, _renamed(program, text), text))
    return require_weights(program, found)


def _refuse_entry(checkpoint: Checkpoint) -> None:
    """Raise InvalidArgument if the state has an entry with the name of the group of constants."""
    record = checkpoint.manifest.files.get(PROGRAM)
    if PROGRAM_GROUP in checkpoint.groups and (record is None or record.kind):
        raise InvalidArgument(
            f"{checkpoint.path}: its state has an entry {PROGRAM_GROUP!r}, which a program needs as a name"
        )
    if record is not None and record.kind:
        raise InvalidArgument(f"{checkpoint.path}: {PROGRAM} is a file that a user published with the step")


def _renamed(program: Program, text: str) -> dict[str, str | None]:
    """Return the stored keys of the weights by a recorded mapping; None for those that are stored in other shapes."""
    if not text:
        return {}
    specs = {}
    for entry in program.state:
        if entry.kind != CONSTANT:
            shape = tuple(int(size) for size in entry.type.shape if isinstance(size, int))
            specs[entry.key] = TensorSpec(entry.key, dtype_named(entry.type.dtype), shape)
    try:
        recipes = Mapping.parse(f"{text}\n").compile(specs).recipes
    except Mismatch:  # the program has the stored keys already
        return {}
    found: dict[str, str | None] = {}
    for target, recipe in recipes.items():
        for source in recipe.sources():
            is_one = source not in found and recipe.is_whole(specs[source].shape)
            found[source] = target if is_one else None
    return found


def _kept_files(manifest: Manifest) -> dict[str, FileRecord]:
    """Return the records of all files but those of the program that is replaced."""
    group = manifest.groups.get(PROGRAM_GROUP)
    gone = {PROGRAM, index_file(PROGRAM_GROUP), *(group.files if group is not None else ())}
    return {name: record for name, record in manifest.files.items() if name not in gone}


def _with_program(manifest: Manifest, attempt: str, kept: dict[str, FileRecord], new: dict[str, bytes]) -> Manifest:
    records, constants = program_records(new, manifest.block_bytes)
    groups = {name: group for name, group in manifest.groups.items() if name != PROGRAM_GROUP}
    return replace(
        manifest, attempt=attempt, saved_by=manifest.identity, files=kept | records, groups=groups | constants
    )


@dataclass(frozen=True, slots=True)
class _CopiedBlock:
    """A block of a tensor file, with the digest that it has to have."""

    file: str
    offset: int
    size: int
    digest: str


def _copy(checkpoint: Checkpoint, attempt: Attempt, files: dict[str, FileRecord]) -> None:
    """Copy tensor files block by block; raises Damaged if a block has another digest than the manifest says."""
    blocks = [
        _CopiedBlock(name, block.offset, block.size, block.digest)
        for name, record in files.items()
        for block in record.blocks
    ]

    def gatherer() -> Callable[[_CopiedBlock], Iterable[memoryview]]:
        readers: dict[str, Reader] = {}

        def gather(block: _CopiedBlock) -> Iterable[memoryview]:
            if block.file not in readers:
                for reader in readers.values():
                    reader.close()
                readers.clear()
                readers[block.file] = checkpoint.open_file(block.file)
            data = bytearray(block.size)
            readers[block.file].read_into(block.offset, [memoryview(data)])
            return [memoryview(data)]

        return gather

    reports: list[BlockReport] = attempt.write(blocks, gatherer, _THREADS)
    for block, report in zip(blocks, reports, strict=True):
        if report.digest != block.digest:
            raise Damaged(f"{checkpoint.path}/{block.file}: the block at {block.offset} has a wrong digest")
