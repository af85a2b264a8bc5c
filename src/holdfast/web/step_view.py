"""The answers about one checkpoint: groups, files, lineage, state.json as a bounded tree, options of its optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.base_reference import references
from holdfast.core.errors import HoldfastError
from holdfast.sources.foreign import Foreign
from holdfast.web.open_steps import OpenStep
from holdfast.web.run_records import RunRecords
from holdfast.web.run_view import layout_axes
from holdfast.web.tensor_index import StepTensor

_ITEMS = 200  # of one list or object of state.json
_VALUES = 20_000  # of the whole tree; long texts count as several
_COUNTED = 20  # characters of a text that count as one value
_TEXT = 2000
_FILES = 20_000
_OPTIONS = 200


def step_fields(records: RunRecords, opened: OpenStep, folder: str) -> dict[str, Any]:
    """Return everything about a checkpoint but its tensors."""
    checkpoint, row = opened.checkpoint, records.rows.get(folder)
    manifest = checkpoint.manifest
    state, problem = _state(opened)
    return {
        "folder": folder,
        "step": manifest.step,
        "address": checkpoint.path,
        "format": checkpoint.format if isinstance(checkpoint, Foreign) else "holdfast",
        "notes": [note[:_TEXT] for note in checkpoint.notes],
        "created": manifest.created[:40] or None,
        "bytes": manifest.total_bytes,
        "world": manifest.writer.get("world"),
        "writer": bounded(dict(manifest.writer)),
        "layout_axes": layout_axes(manifest.writer),
        "groups": [_group(opened, name) for name in checkpoint.groups],
        "files": [
            {"name": name, "bytes": record.size, "blocks": len(record.blocks), "kind": record.kind}
            for name, record in list(manifest.files.items())[:_FILES]
        ],
        "lineage": {
            "parent": manifest.parent,
            "abandons": [step for step, _ in manifest.abandons],
            "skips": [step for step, _ in manifest.skips],
        },
        "metrics": bounded(dict(manifest.metrics)),
        "bases": list(references(manifest.bases)),
        "mappings": bounded(dict(manifest.mappings)),
        "plans": sorted(manifest.plans),
        "state": bounded(dict(state)),
        "state_problem": problem,
        "config": _config(opened),
        "optimizer": _optimizers(state),
        "tags": list(row.tags) if row is not None else [],
        "state_of_step": row.state if row is not None else "committed",
        "note": row.note if row is not None else None,
    }


def _group(opened: OpenStep, name: str) -> dict[str, Any]:
    """Return a group's line; `keys` is None until its headers were read, which a large one takes a moment for."""
    record = opened.checkpoint.manifest.groups[name]
    return {
        "name": name,
        "kind": record.kind,
        "keys": opened.count(name),
        "bytes": record.total_bytes,
        "files": list(record.files[:_FILES]),
        "aliases": bounded(dict(record.aliases)),
    }


def _state(opened: OpenStep) -> tuple[Mapping[str, Any], str | None]:
    try:
        return opened.checkpoint.state, None
    except (HoldfastError, OSError) as error:
        return {}, str(error)


def _config(opened: OpenStep) -> Any:
    try:
        return bounded(opened.checkpoint.config())
    except (HoldfastError, OSError):
        return None


def _optimizers(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of every parameter group of every optimizer."""
    found = []
    for name, entry in state.items():
        if entry.get("kind") != "optimizer" or not isinstance(entry.get("groups"), list):
            continue
        for number, group in enumerate(entry["groups"][:_OPTIONS]):
            if not isinstance(group, Mapping):
                continue
            options = group.get("options", {key: value for key, value in group.items() if key != "params"})
            params = group.get("params")
            found.append(
                {
                    "group": name,
                    "number": number,
                    "params": len(params) if isinstance(params, list) else None,
                    "options": bounded(options),
                }
            )
    return found


def bounded(value: Any) -> Any:
    """Return JSON cut to a bounded size: long lists and texts end with a note of how much is left out."""
    return _bounded(value, [_VALUES])


def _bounded(value: Any, left: list[int]) -> Any:
    left[0] -= 1
    if isinstance(value, str):
        left[0] -= min(len(value), _TEXT) // _COUNTED
        return value if len(value) <= _TEXT else f"{value[:_TEXT]}... ({len(value)} characters)"
    if isinstance(value, Mapping):
        out = {}
        for number, (key, item) in enumerate(value.items()):
            if number >= _ITEMS or left[0] <= 0:
                out["..."] = f"{len(value) - number} more"
                break
            left[0] -= len(key) // _COUNTED
            out[str(key)[:_TEXT]] = _bounded(item, left)
        return out
    if isinstance(value, list | tuple):
        items = []
        for number, item in enumerate(value):
            if number >= _ITEMS or left[0] <= 0:
                items.append(f"... {len(value) - number} more")
                break
            items.append(_bounded(item, left))
        return items
    return value


def tensor_detail(opened: OpenStep, tensor: StepTensor) -> dict[str, Any]:
    """Return where a tensor is stored: its file, its bytes, and the blocks that hold them."""
    first, after = opened.blocks(tensor)
    blocks = opened.checkpoint.manifest.files[tensor.file].blocks[first:after] if tensor.file is not None else ()
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.bytes,
        "file": tensor.file,
        "begin": tensor.begin,
        "end": tensor.end,
        "blocks": [
            {"begin": block.offset, "end": block.offset + block.size, "digest": block.digest, "writer": None}
            for block in blocks[:1000]
        ],
        "scale": None,
    }
