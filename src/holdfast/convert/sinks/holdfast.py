"""The Holdfast sink: tensor files, indexes, state.json and manifest as a save of the same state writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from holdfast.checkpoint.commit import BlockReport, FileFacts, file_records, small_file_record
from holdfast.convert.sinks.base import Output, SinkRequest, tensor_files
from holdfast.convert.spans import TensorFile
from holdfast.core import names
from holdfast.core.errors import Unsupported
from holdfast.format import strictjson
from holdfast.format.manifest import GroupRecord, Manifest, encode_manifest
from holdfast.format.safetensors import encode_index
from holdfast.layout.placement import tp_degree_of
from holdfast.plan.contents import Contents
from holdfast.plan.files import TensorSpec, split_group
from holdfast.version import __version__


def plan(contents: Contents, request: SinkRequest) -> Output:
    """Plan the files of every group, their indexes, state.json and the manifest."""
    files: list[TensorFile] = []
    records: dict[str, GroupRecord] = {}
    small: dict[str, bytes] = dict(request.side_files)
    small[names.STATE] = _state_json(contents)
    for name, group in sorted(contents.groups.items()):
        specs = [TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in group.tensors.items()]
        planned = split_group(name, specs, request.max_shard_bytes, group.kind)
        files += tensor_files(name, planned, group.tensors)
        total = sum(spec.bytes for spec in specs)
        aliases, logical = dict(sorted(group.aliases.items())), dict(group.logical)
        records[name] = GroupRecord(group.kind, tuple(file.name for file in planned), total, aliases, logical)
        if group.kind == names.ADAPTER:
            continue
        weight_map = {place.spec.key: file.name for file in planned for place in file.places}
        stem = names.file_stem(name, group.kind)
        small[names.index_file(stem)] = encode_index(weight_map, total, names.group_folder(stem))
    facts = [FileFacts.of(file.plan) for file in files]

    def small_files(attempt: str, reports: Sequence[BlockReport]) -> Mapping[str, bytes]:
        written = file_records(facts, reports)
        written |= {name: small_file_record(data, request.block_bytes) for name, data in sorted(small.items())}
        manifest = Manifest(
            step=contents.step,
            parent=None,
            attempt=attempt,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            block_bytes=request.block_bytes,
            groups=records,
            files=written,
            writer=_writer(contents, request.writer),
            metrics=request.metrics,
            plans=request.plans,
            bases=request.bases,
            mappings=request.mappings,
        )
        return {**small, names.MANIFEST: encode_manifest(manifest)}

    return Output(tuple(files), small_files)


def _state_json(contents: Contents) -> bytes:
    entries = {name: _canonical(entry) for name, entry in sorted(contents.state.items())}
    data = strictjson.dumps({"version": 1, "entries": entries}) + b"\n"
    problem = strictjson.size_problem(data)
    if problem:
        raise Unsupported(f"the values other than tensors take {problem}")
    return data


def _canonical(entry: Any) -> Any:
    """Return an entry as a save writes it, with an optimizer's parameters in natural order."""
    if entry.get("kind") != "optimizer":
        return entry
    groups = [group | {"params": sorted(group["params"], key=names.natural_key)} for group in entry["groups"]]
    return entry | {"groups": groups, "stateless": sorted(entry.get("stateless", ()))}


def _writer(contents: Contents, source_writer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the writer's fields: this version, and the source's mesh unless the TP degree of fused weights differs."""
    mesh = dict(source_writer.get("mesh", {}))
    if contents.tp_degree is not None and tp_degree_of(mesh) != contents.tp_degree:
        mesh = {"tp": contents.tp_degree}
    kept = {name: source_writer[name] for name in ("world", "hosts", "first_replica") if name in source_writer}
    return {"holdfast": __version__, "world": 1, "hosts": 1, **kept, "mesh": mesh}
