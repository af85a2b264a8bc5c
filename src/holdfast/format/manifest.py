"""The manifest: records of files, blocks and groups; encoding with its own digest, strict decoding, upgrades.

Its presence under a committed name is the commit. See docs/format.md for the fields. A newer major
version is refused; an older one is upgraded by one patch per version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core import limits, names
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.core.names import MANIFEST, check_case_collisions, check_file, check_group, key_problem
from holdfast.format import strictjson
from holdfast.format.digest import HEX_DIGITS, digest_hex
from holdfast.format.dtypes import is_dtype

CURRENT = (1, 3)
BASE_MODES = ("reference", "full", "none")  # how the base model of PEFT adapters is stored
GROUP_KINDS = frozenset(
    {"module", "optimizer", "masters", "tensors", "stateful", names.ADAPTER, names.BASE, names.BUFFERS}
)
FILE_KINDS = frozenset({"extra"})  # besides tensor files, indexes, state.json and configs, which have none

# From major version N to N + 1: one function each, tested with the golden checkpoints.
Patches = dict[int, Callable[[dict[str, Any]], dict[str, Any]]]
PATCHES: Patches = {}
_BEGINNING = b'{"format":"holdfast","version":[%d,' % CURRENT[0]


def upgrade(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Upgrade the fields of a manifest to the current version."""
    return upgrade_fields(fields, where, CURRENT[0], PATCHES, "format version")


def upgrade_fields(fields: dict[str, Any], where: str, current: int, patches: Patches, what: str) -> dict[str, Any]:
    """Apply the patches up to the current major version; raises Unsupported for a newer one."""
    version = fields.get("version")
    if not isinstance(version, list) or len(version) != 2 or not all(type(n) is int and n >= 0 for n in version):
        raise Damaged(f"{where}: the version {str(version)[:40]!r} is not two numbers")
    major: int = version[0]
    if major > current:
        raise Unsupported(
            f"{where}: written in {what} {major}.{version[1]}, but this Holdfast reads only up to "
            f"{current}.x: install a newer version"
        )
    while major < current:
        if major not in patches:
            raise Damaged(f"{where}: {what} {major} never existed")
        fields = patches[major](fields)
        major += 1
    return fields


def unknown(what: str, version: tuple[int, int], where: str) -> HoldfastError:
    """Return the error for content that this version does not have: a newer one may, else it is damage."""
    if version <= CURRENT:
        return Damaged(f"{where}: {what}")
    return Unsupported(
        f"{where}: {what}; it was written in format version {version[0]}.{version[1]}, and this Holdfast knows "
        f"{CURRENT[0]}.{CURRENT[1]}: install a newer version"
    )


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A byte range of one file, the unit of writing, digest and verification."""

    offset: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size, the blocks that cover it, and the header of a tensor file.

    The header is part of the first block. Its own digest lets a reader trust it without reading
    the whole block. `kind` is "extra" for a file that a user added.
    """

    size: int
    blocks: tuple[BlockRecord, ...]
    header: BlockRecord | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group of tensors: its files in order, its tied keys, and dtypes that headers cannot express."""

    kind: str
    files: tuple[str, ...]
    total_bytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    logical_dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a reader needs to trust a checkpoint."""

    step: int | None
    parent: int | None
    attempt: str
    created: str
    block_bytes: int
    groups: Mapping[str, GroupRecord]
    files: Mapping[str, FileRecord]
    writer: Mapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    abandons: tuple[tuple[int, str], ...] = ()  # steps and attempts abandoned by a rewind
    skips: tuple[tuple[int, str], ...] = ()  # damaged steps and attempts that a restore skipped
    plans: Mapping[str, Any] = field(default_factory=dict)  # the sharding plan of holdfast.spmd by module
    bases: Mapping[str, Any] = field(default_factory=dict)  # by module with PEFT adapters: where its base model is
    mappings: Mapping[str, str] = field(default_factory=dict)  # by module: from names in memory to those in the files
    saved_by: str = ""  # the attempt that saved the step, where `attempt` has rewritten it since
    version: tuple[int, int] = CURRENT  # of the format it was read in

    @property
    def identity(self) -> str:
        """The attempt by which lineage, tags and captured states refer to the step: a rewritten one keeps it."""
        return self.saved_by or self.attempt

    @property
    def total_bytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def content(self) -> tuple[Any, ...]:
        """Return the fields that depend only on the contents, not on the writer or the time."""
        return self.step, dict(self.groups), dict(self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON that ends with its own digest."""
    fields: dict[str, Any] = {
        "format": "holdfast",
        "version": list(CURRENT),
        "step": manifest.step,
        "parent": manifest.parent,
        "attempt": manifest.attempt,
        "created": manifest.created,
        "writer": dict(manifest.writer),
        "block_bytes": manifest.block_bytes,
        "groups": {name: _group_fields(group) for name, group in manifest.groups.items()},
        "files": {name: _file_fields(record) for name, record in manifest.files.items()},
    }
    if manifest.metrics:
        fields["metrics"] = dict(manifest.metrics)
    for name in ("abandons", "skips"):
        if getattr(manifest, name):
            fields[name] = [list(left) for left in getattr(manifest, name)]
    if manifest.plans:
        fields["plans"] = dict(manifest.plans)
    if manifest.bases:
        fields["bases"] = dict(manifest.bases)
    if manifest.mappings:
        fields["mappings"] = dict(manifest.mappings)
    if manifest.saved_by:
        fields["saved_by"] = manifest.saved_by
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    return strictjson.dumps(fields) + b"\n"


def _file_fields(record: FileRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"size": record.size}
    if record.header is not None:
        fields["header"] = [record.header.size, record.header.digest]
    if record.kind:
        fields["kind"] = record.kind
    fields["blocks"] = [[block.offset, block.size, block.digest] for block in record.blocks]
    return fields


def _group_fields(group: GroupRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": group.kind, "files": list(group.files), "total_bytes": group.total_bytes}
    if group.aliases:
        fields["aliases"] = dict(group.aliases)
    if group.logical_dtypes:
        fields["logical_dtypes"] = dict(group.logical_dtypes)
    return fields


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest if its digest, version and fields are valid; raises Damaged otherwise."""
    where = f"{where}/{MANIFEST}"
    if data.startswith(_BEGINNING):  # counted before parsing; a newer version may have other limits
        _check_count(data.count(b'"blocks":['), where)
    fields = strictjson.loads(data, where)
    if not isinstance(fields, dict) or fields.get("format") != "holdfast":
        raise Damaged(f"{where}: not a Holdfast manifest")
    stated = fields.pop("digest", None)
    text = strictjson.dumps(fields)
    found = digest_hex(text)
    if stated != found:
        raise Damaged(f"{where}: the digest of the manifest is {found}, but it states {str(stated)[:40]}")
    if data != text[:-1] + b',"digest":"' + found.encode() + b'"}\n':
        raise Damaged(f"{where}: the manifest is not in the form that Holdfast writes")
    try:
        return _from_fields(upgrade(fields, where), where)
    except HoldfastError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{where}: a field is missing or invalid: {type(error).__name__}: {error}") from None


def _check_count(files: int, where: str) -> None:
    if files > limits.MANIFEST_FILES:
        raise Damaged(f"{where}: {files} files, more than the limit of {limits.MANIFEST_FILES}")


def _from_fields(fields: dict[str, Any], where: str) -> Manifest:
    _check_count(len(fields["files"]), where)
    version: tuple[int, int] = (fields["version"][0], fields["version"][1])
    files = {name: _file_record(name, record, version, where) for name, record in fields["files"].items()}
    check_case_collisions((MANIFEST, *files), where)
    groups = {name: _group_record(name, record, files, version, where) for name, record in fields["groups"].items()}
    return Manifest(
        step=_number(fields["step"], "step", optional=True),
        parent=_number(fields["parent"], "parent", optional=True),
        attempt=str(fields["attempt"]),
        created=str(fields["created"]),
        block_bytes=_number(fields["block_bytes"], "block_bytes") or 0,
        groups=groups,
        files=files,
        writer=_writer(fields["writer"]),
        metrics=_metrics(fields.get("metrics", {})),
        abandons=_left(fields.get("abandons", []), "abandons"),
        skips=_left(fields.get("skips", []), "skips"),
        plans=_plans(fields.get("plans", {})),
        bases=_bases(fields.get("bases", {}), version, where),
        mappings=_mappings(fields.get("mappings", {})),
        saved_by=str(fields.get("saved_by", "")),
        version=version,
    )


def _plans(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict) or not all(isinstance(plan, dict) for plan in fields.values()):
        raise ValueError("plans are not a map of module to plan")
    for name in fields:
        check_group(name)
    return dict(fields)


def _bases(fields: Any, version: tuple[int, int], where: str) -> dict[str, Any]:
    if not isinstance(fields, dict) or not all(isinstance(base, dict) for base in fields.values()):
        raise ValueError("bases are not a map of module to base model")
    for name, base in fields.items():
        check_group(name)
        if base.get("mode") not in BASE_MODES:
            mode = str(base.get("mode"))[:40]
            raise unknown(f"the base model of {name} is stored in the unknown way {mode!r}", version, where)
        quantized = base.get("quantized", [])
        if not isinstance(quantized, list) or not all(isinstance(kind, str) for kind in quantized):
            raise ValueError(f"the quantization of the base model of {name} is not a list of texts")
        if base["mode"] == "reference":
            _check_base_files(base)
    return dict(fields)


def _check_base_files(base: Mapping[str, Any]) -> None:
    """Raise ValueError unless the reference has a source, and a size and a digest for each file."""
    if not isinstance(base["source"], str) or not isinstance(base.get("revision"), str | None):
        raise ValueError("the source or the revision of a base model is not a text")
    for name, (size, digest) in base["files"].items():
        _number(size, "the size of a file of a base model")
        if not isinstance(digest, str) or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"the file {name[:80]!r} of a base model is not recorded as size and digest")


def _mappings(fields: Any) -> dict[str, str]:
    if not isinstance(fields, dict) or not all(isinstance(text, str) for text in fields.values()):
        raise ValueError("mappings are not a map of module to text")
    for name in fields:
        check_group(name)
    return dict(fields)


def _left(fields: Any, name: str) -> tuple[tuple[int, str], ...]:
    if not isinstance(fields, list) or not all(isinstance(left, list) and len(left) == 2 for left in fields):
        raise ValueError(f"{name} are not pairs of step and attempt")
    return tuple((_number(step, name) or 0, str(attempt)) for step, attempt in fields)


def _metrics(fields: Any) -> dict[str, float | None]:
    if not all(value is None or type(value) in (int, float) for value in fields.values()):
        raise ValueError("metrics are not a map of name to number")
    return dict(fields)


def _writer(fields: Any) -> dict[str, Any]:
    mesh, first_replica = fields.get("mesh", {}), fields.get("first_replica", [])
    if not all(type(size) is int for size in mesh.values()):
        raise ValueError("writer.mesh is not a map of axis to size")
    if not isinstance(first_replica, list) or not all(isinstance(name, str) for name in first_replica):
        raise ValueError("writer.first_replica is not a list of names")
    return dict(fields)


def _number(value: Any, name: str, *, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    return value


def _file_record(name: str, fields: Any, version: tuple[int, int], where: str) -> FileRecord:
    check_file(name, where)
    kind = fields.get("kind", "")
    if kind and kind not in FILE_KINDS:
        raise unknown(f"{name} is a file of the unknown kind {str(kind)[:40]!r}", version, where)
    if len(fields["blocks"]) > limits.BLOCKS_PER_FILE:
        raise Damaged(f"{where}: {name} has more than {limits.BLOCKS_PER_FILE} blocks")
    blocks = []
    position = 0
    for offset, size, digest in fields["blocks"]:
        if (
            type(offset) is not int
            or offset != position
            or type(size) is not int
            or size <= 0
            or len(digest) != HEX_DIGITS
        ):
            raise Damaged(f"{where}: the blocks of {name} are not consecutive at {position}")
        blocks.append(BlockRecord(offset, size, digest))
        position += size
    if position != _number(fields["size"], "size"):
        raise Damaged(f"{where}: the blocks of {name} cover {position} of {fields['size']} bytes")
    header = None
    if "header" in fields:
        size, digest = fields["header"]
        if type(size) is not int or not 0 < size <= position or len(digest) != HEX_DIGITS:
            raise Damaged(f"{where}: the header record of {name} is invalid")
        header = BlockRecord(0, size, digest)
    return FileRecord(position, tuple(blocks), header, kind)


def _group_record(
    name: str, fields: Any, files: Mapping[str, FileRecord], version: tuple[int, int], where: str
) -> GroupRecord:
    check_group(name)
    kind = fields["kind"]
    if kind not in GROUP_KINDS:
        raise unknown(f"{name} is a group of the unknown kind {str(kind)[:40]!r}", version, where)
    missing = [file for file in fields["files"] if file not in files]
    if missing or not fields["files"]:
        raise Damaged(f"{where}: group {name} names the file {str(missing[:1])[:80]}, which is not recorded")
    aliases, logical = dict(fields.get("aliases", {})), dict(fields.get("logical_dtypes", {}))
    for key in (*aliases, *aliases.values(), *logical):
        problem = key_problem(key)
        if problem:
            raise Damaged(f"{where}: group {name}: the key {str(key)[:80]!r} {problem}")
    for dtype in logical.values():
        if not isinstance(dtype, str) or not is_dtype(dtype):
            raise unknown(f"group {name}: unknown dtype {str(dtype)[:40]!r}", version, where)
    return GroupRecord(
        kind=kind,
        files=tuple(fields["files"]),
        total_bytes=_number(fields["total_bytes"], "total_bytes") or 0,
        aliases=aliases,
        logical_dtypes=logical,
    )
