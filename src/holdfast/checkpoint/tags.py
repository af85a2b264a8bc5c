"""Tags: write, read and delete names of steps, and find the folders that they protect; retention.py decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from holdfast.checkpoint.catalog import Committed
from holdfast.core import limits
from holdfast.core.errors import Damaged, InvalidArgument, NotFound
from holdfast.core.names import is_plain
from holdfast.format import strictjson
from holdfast.storage.base import Storage

_FOLDER = ".tags"


@dataclass(frozen=True, slots=True)
class Tag:
    """The step that a tag names, and the attempt that was tagged."""

    step: int
    attempt: str


def read_tags(storage: Storage, problems: list[str] | None = None) -> dict[str, Tag]:
    """Return every tag by name; raises Damaged for an unreadable tag, since it may protect a step.

    With `problems`, unreadable tags are appended there instead, for callers that remove nothing.
    """
    found = {}
    for name in tag_names(storage):
        try:
            found[name] = _read(storage, name)
        except Damaged as error:
            if problems is None:
                raise
            problems.append(str(error))
    return found


def tag_names(storage: Storage) -> list[str]:
    """Return the names of all tags, readable or not."""
    try:
        return sorted(name for name in storage.files(_FOLDER) if is_plain(name))
    except NotFound:
        return []


def _read(storage: Storage, name: str) -> Tag:
    where = f"{storage.name}/{_FOLDER}/{name}"
    try:
        fields = strictjson.loads(storage.read(_FOLDER, name, limits.JSON_BYTES), where)
    except Damaged as error:
        raise Damaged(f"{error}; {_remedy(storage, name)}") from None
    if not isinstance(fields, dict) or type(fields.get("step")) is not int:
        raise Damaged(f"{where} is not a tag; {_remedy(storage, name)}")
    return Tag(fields["step"], str(fields.get("attempt")))


def _remedy(storage: Storage, name: str) -> str:
    return f"tag again with `holdfast tag {storage.name} {name} --step N`, or delete it with --delete"


def tagged(storage: Storage, entries: Iterable[Committed], problems: list[str] | None = None) -> dict[str, list[str]]:
    """Return the tag names by protected folder: the folder that now holds the tagged attempt.

    If that attempt is gone because the step was saved again, the tag protects the new one.
    `problems` is as in `read_tags`.
    """
    found: dict[str, list[str]] = {}
    tags = read_tags(storage, problems)
    if not tags:
        return found
    by_attempt: dict[str, list[Committed]] = {}
    by_step: dict[int, list[Committed]] = {}
    for entry in entries:
        by_step.setdefault(entry.step, []).append(entry)
        if entry.manifest is not None:
            by_attempt.setdefault(entry.manifest.identity, []).append(entry)
    for name, tag in tags.items():
        for entry in by_attempt.get(tag.attempt) or by_step.get(tag.step, []):
            found.setdefault(entry.folder, []).append(name)
    return found


def add_tag(storage: Storage, name: str, entry: Committed) -> None:
    """Tag a step, moving a tag that exists; raises NotFound if the step was removed in the meantime."""
    if not is_plain(name) or "/" in name:
        raise InvalidArgument(f"the tag {name[:80]!r}: use letters, digits, '_', '.' and '-'")
    if entry.manifest is None:
        raise Damaged(f"step {entry.step} cannot be tagged: {entry.problem}")
    if _FOLDER not in storage.hidden():
        storage.begin(_FOLDER)
    tag = Tag(entry.step, entry.manifest.identity)
    storage.note(_FOLDER, name, strictjson.dumps(asdict(tag)), durable=True)
    if entry.folder not in storage.folders():
        storage.drop(_FOLDER, name)
        raise NotFound(f"{storage.name} has no {entry.folder}: it was deleted while it was being tagged")


def remove_tag(storage: Storage, name: str) -> None:
    """Delete a tag; raises NotFound if it does not exist."""
    if name not in tag_names(storage):
        raise NotFound(f"{storage.name} has no tag {name!r}")
    storage.drop(_FOLDER, name)
