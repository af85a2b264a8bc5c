"""A note about the files of a foreign folder that no reader has read."""

from __future__ import annotations

import re
from dataclasses import replace

from holdfast.core.names import MANIFEST, natural_key
from holdfast.sources.foreign import Folder, ReaderResult, is_code, is_side_file, names_code

_NAMED = 12
_DOCUMENTS = re.compile(
    r"(?:.*/)?(?:\..*|readme.*|licen[sc]e.*|notice.*|.*\.(?:md|rst|txt|png|jpe?g|gif|svg|pdf|html))", re.I
)
_INDEXES = (".index.json", "trainer_state.json")


def note_unread(folder: Folder, result: ReaderResult) -> ReaderResult:
    """Return a reader's result with a note about the files that were left out."""
    if folder.only is not None:
        return result
    used = {
        place.file for group in result.contents.groups.values() for r in group.tensors.values() for place in r.sources()
    }
    left = [
        name
        for name in sorted(folder.files, key=natural_key)
        if name not in used and name not in result.read and not _needs_no_note(name)
    ]
    left = [name for name in left if not (is_code(name) and names_code(folder))]
    if not left:
        return result
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    note = f"{folder.path}: left out because they were not read: {', '.join(left[:_NAMED])}{more}"
    return replace(result, notes=(*result.notes, note))


def _needs_no_note(name: str) -> bool:
    """Return True if a file is copied unchanged, or only describes the others."""
    return is_side_file(name) or name.endswith(_INDEXES) or name == MANIFEST or _DOCUMENTS.fullmatch(name) is not None
