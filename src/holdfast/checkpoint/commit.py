"""The commit, the manifest part that all saves of a plan share; manifests made from it and `BlockReport`s.

It is built together with the plan and sent as JSON to the process that publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from holdfast.checkpoint.lineage import Lineage
from holdfast.core import names
from holdfast.core.errors import StorageError, Unsupported
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import BlockRecord, FileRecord, GroupRecord, Manifest
from holdfast.format.safetensors import LENGTH_BYTES, encode_index
from holdfast.layout.placement import Mesh
from holdfast.plan.files import FilePlan
from holdfast.plan.state_values import (
    EXTRA,
    RankValue,
    extra_files,
    merge_bases,
    merge_files,
    merge_plans,
    merge_values,
    program_files,
    values_from,
)
from holdfast.version import __version__


@dataclass(frozen=True, slots=True)
class BlockReport:
    """A written block, as reported by its writer."""

    file: str
    offset: int
    size: int
    digest: str

    def fields(self) -> list[Any]:
        """Return the JSON form."""
        return [self.file, self.offset, self.size, self.digest]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> BlockReport:
        """Decode the JSON form; raises TypeError or ValueError if it is invalid."""
        file, offset, size, digest = fields
        return BlockReport(file, offset, size, digest)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A tensor file before it is written: its name and size, and the size and digest of its header."""

    name: str
    size: int
    header_bytes: int
    header_digest: str

    @staticmethod
    def of(file: FilePlan) -> FileFacts:
        return FileFacts(file.name, file.size, len(file.header), digest_hex(file.header))


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """How long a background save took, and how long training waited for it on rank 0."""

    seconds: float
    stall_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The files and groups of a plan, and the data needed to merge the values of all ranks."""

    block_bytes: int
    files: tuple[FileFacts, ...]
    groups: dict[str, GroupRecord]
    keys: dict[str, dict[str, str]]  # group to key to file
    axes: dict[str, tuple[str, ...]]
    mesh: Mesh
    world: int
    hosts: int
    first_replica: tuple[str, ...]
    mappings: dict[str, str] = field(default_factory=dict)  # by module, those recorded in the manifest

    def fields(self) -> dict[str, Any]:
        """Return the JSON form; without mappings, it is that of releases that had none."""
        fields = asdict(self)
        if not self.mappings:
            del fields["mappings"]
        return fields

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Commit:
        mesh = fields["mesh"]
        return Commit(
            block_bytes=fields["block_bytes"],
            files=tuple(FileFacts(**file) for file in fields["files"]),
            groups={name: _group_from(group) for name, group in fields["groups"].items()},
            keys=fields["keys"],
            axes={name: tuple(axes) for name, axes in fields["axes"].items()},
            mesh=Mesh(tuple(mesh["axes"]), tuple(mesh["sizes"]), tuple(mesh["ranks"])),
            world=fields["world"],
            hosts=fields["hosts"],
            first_replica=tuple(fields["first_replica"]),
            mappings=dict(fields.get("mappings", {})),
        )

    def manifest(
        self,
        attempt: str,
        lineage: Lineage,
        reports: Iterable[BlockReport],
        values: Sequence[Mapping[str, Any]],
        times: SaveTimes | None = None,
    ) -> tuple[Manifest, dict[str, bytes]]:
        """Build the manifest and the small files from the writers' reports and the values of all ranks.

        `times` are for people.
        Raises StorageError if some bytes were not written, and LayoutError if the values of the
        ranks contradict each other.
        """
        rank_values = values_from(values)
        small, extra = self._small_files(rank_values), extra_files(rank_values)
        program, groups = program_records(program_files(rank_values), self.block_bytes)
        records = file_records(self.files, reports)
        records |= {name: small_file_record(data, self.block_bytes) for name, data in sorted(small.items())}
        records |= program
        extra = _without_clashes(extra, records)
        records |= {name: small_file_record(data, self.block_bytes, EXTRA) for name, data in sorted(extra.items())}
        writer: dict[str, Any] = {
            "holdfast": __version__,
            "world": self.world,
            "hosts": self.hosts,
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
        }
        if times is not None:
            writer |= {name: value for name, value in asdict(times).items() if value is not None}
        if self.first_replica:
            writer["first_replica"] = list(self.first_replica)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest(
            step=lineage.step,
            parent=lineage.parent,
            attempt=attempt,
            created=now,
            block_bytes=self.block_bytes,
            groups=self.groups | groups,
            files=records,
            writer=writer,
            metrics=lineage.metrics,
            abandons=lineage.abandons,
            skips=lineage.skips,
            plans=merge_plans(rank_values),
            bases=merge_bases(rank_values),
            mappings=self.mappings,
        )
        return manifest, small | program_files(rank_values) | extra

    def _small_files(self, values: Sequence[Mapping[str, RankValue]]) -> dict[str, bytes]:
        small = merge_files(values)
        entries = merge_values(values, self.axes, self.mesh, self.keys)
        small[names.STATE] = strictjson.dumps({"version": 1, "entries": entries}) + b"\n"
        problem = strictjson.size_problem(small[names.STATE])
        if problem:
            raise Unsupported(f"the values that are not tensors take {problem}; save large ones as tensors")
        return small | self.indexes()

    def indexes(self) -> dict[str, bytes]:
        """Return the index files of the groups by name."""
        out = {}
        for group, record in self.groups.items():
            if record.kind == names.ADAPTER:
                continue  # one file, as PEFT writes it
            stem = names.file_stem(group, record.kind)
            out[names.index_file(stem)] = encode_index(self.keys[group], record.total_bytes, names.group_folder(stem))
        return out


def _group_from(fields: Mapping[str, Any]) -> GroupRecord:
    return GroupRecord(**{**fields, "files": tuple(fields["files"])})


def _without_clashes(extra: Mapping[str, bytes], own: Iterable[str]) -> dict[str, bytes]:
    """Return a user's files but those with the name of a file or folder of the checkpoint, in any case.

    The call of `save` refuses them by the entries of rank 0; those of other ranks must not fail the commit.
    """
    taken = {part for name in own for part in (name.lower(), name.partition("/")[0].lower())}
    return {name: data for name, data in extra.items() if name.partition("/")[0].lower() not in taken}


def small_file_record(data: bytes, block_bytes: int, kind: str = "") -> FileRecord:
    """Return the record of a file that is written whole."""
    blocks = tuple(
        BlockRecord(at, len(data[at : at + block_bytes]), digest_hex(data[at : at + block_bytes]))
        for at in range(0, len(data), block_bytes)
    )
    return FileRecord(len(data), blocks, kind=kind)


def program_records(
    files: Mapping[str, bytes], block_bytes: int
) -> tuple[dict[str, FileRecord], dict[str, GroupRecord]]:
    """Return the records of a program's files, and the group of its constants if it has any."""
    records = {name: small_file_record(data, block_bytes) for name, data in files.items()}
    groups = {}
    for name, data in files.items():
        if names.is_tensor_file(name):
            header = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
            record = BlockRecord(0, header, digest_hex(data[:header]))
            records[name] = replace(records[name], header=record)
            groups[names.PROGRAM_GROUP] = GroupRecord("tensors", (name,), len(data) - header)
    return records, groups


def file_records(files: Iterable[FileFacts], reports: Iterable[BlockReport]) -> dict[str, FileRecord]:
    """Build the records of the tensor files from the writers' reports; raises StorageError for missing bytes."""
    files = list(files)
    by_file: dict[str, list[BlockReport]] = {file.name: [] for file in files}
    for report in reports:
        by_file[report.file].append(report)
    records = {}
    for file in files:
        position = 0
        blocks = []
        for report in sorted(by_file[file.name], key=lambda report: report.offset):
            if report.offset != position:
                raise StorageError(f"{file.name}: no writer reported the bytes from {position} to {report.offset}")
            blocks.append(BlockRecord(report.offset, report.size, report.digest))
            position += report.size
        if position != file.size:
            raise StorageError(f"{file.name}: {position} of {file.size} bytes were reported as written")
        header = BlockRecord(0, file.header_bytes, file.header_digest)
        records[file.name] = FileRecord(file.size, tuple(blocks), header)
    return records
