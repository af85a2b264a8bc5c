"""Tags: names that people give to checkpoints. A tagged one is never removed by retention."""

from __future__ import annotations

from typing import Any

from holdfast.core import limits
from holdfast.core.errors import HoldfastError, InvalidArgument, NotFound
from holdfast.core.filenames import is_plain
from holdfast.format import strictjson
from holdfast.persist.catalog import Committed
from holdfast.storage.base import Storage

_FOLDER = ".tags"


def tags(storage: Storage) -> dict[str, dict[str, Any]]:
    """Every tag with its step and attempt; one that cannot be read is an error, since it may protect something."""
    found = {}
    try:
        names = storage.files(_FOLDER)
    except NotFound:
        return {}
    for name in sorted(names):
        fields = strictjson.loads(storage.read(_FOLDER, name, limits.JSON_BYTES), f"{_FOLDER}/{name}")
        if not isinstance(fields, dict) or type(fields.get("step")) is not int:
            raise HoldfastError(f"{storage.name}/{_FOLDER}/{name} is not a tag; remove it, or tag anew")
        found[name] = fields
    return found


def add_tag(storage: Storage, name: str, entry: Committed) -> None:
    """Give a checkpoint a name, taking it from another that had it."""
    if not is_plain(name) or "/" in name:
        raise InvalidArgument(f"the tag {name[:80]!r}: use letters, digits, '_', '.' and '-'")
    if entry.manifest is None:
        raise InvalidArgument(f"step {entry.step} is damaged: {entry.problem}")
    if _FOLDER not in storage.hidden():
        storage.begin(_FOLDER)
    storage.note(_FOLDER, name, strictjson.dumps({"step": entry.step, "attempt": entry.manifest.attempt}), durable=True)


def remove_tag(storage: Storage, name: str) -> None:
    if name not in tags(storage):
        raise NotFound(f"{storage.name} has no tag {name!r}")
    storage.drop(_FOLDER, name)
