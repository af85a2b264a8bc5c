"""Listings of the committed folders of an object store: stamps from etags, changes, prefixes that are known.

A listing includes the etag of every manifest. A manifest with an unchanged etag points to the same
data and is not read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core.names import MANIFEST
from holdfast.storage.objects.calls import PAGE, Calls, ListedObject, VersionedObject
from holdfast.storage.objects.pins import prefix_named

_BEFORE = ".~"  # sorts after all hidden names and before all others
_STEPS = "step-"
_PAGES = 4  # list requests in one call of `changes`
_FILE = f"/{MANIFEST}"


def manifest_stamp(manifest: VersionedObject) -> str:
    """Return the stamp of a manifest that was read."""
    return _stamp(manifest.version.get("e_tag", ""), len(manifest.data))


def _stamp(tag: str, size: int) -> str:
    return f"{tag}:{size}" if tag else ""  # without an etag the manifest is read every time


class Pointers:
    """The committed folders of one root."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._prefixes: dict[str, tuple[str, str]] = {}  # by folder: the stamp of a valid manifest, and its data prefix

    def stamps(self) -> dict[str, str]:
        """Return every folder with the stamp of its manifest, "" without a manifest."""
        return _by_folder(self._calls.list_after(_BEFORE))

    def first_folders(self) -> set[str]:
        """Return at least the folders that sort before the steps, such as those that were set aside."""
        folders: set[str] = set()
        after = _BEFORE
        while True:
            page = self._calls.list_after(after, one_page=True)
            folders |= _by_folder(page).keys()
            if len(page) < PAGE or page[-1].key > _STEPS:
                return folders
            after = page[-1].key

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        """Compare all folders if one or two requests list them, else only pages with important folders."""
        if len(known) <= PAGE:
            return _differences(known, self.stamps())
        changed: dict[str, str | None] = {}
        names = sorted(known)
        waiting = sorted(set(important) & known.keys())
        for _ in range(_PAGES):
            if not waiting:
                break
            before = names[: names.index(waiting[0])][-1:]
            page = self._calls.list_after(f"{before[0]}{_FILE}" if before else _BEFORE, one_page=True)
            last = page[-1].key.partition("/")[0] if len(page) >= PAGE else "\uffff"
            inside = {name: known[name] for name in names if (not before or name > before[0]) and name <= last}
            changed |= _differences(inside, _by_folder(page))
            waiting = [name for name in waiting if name > last]
        return changed

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        """Record which attempt a valid manifest names, so that the manifest is not read again."""
        self._prefixes[folder] = (stamp, prefix_named(attempt) or folder)

    def prefix(self, folder: str, stamp: str) -> str | None:
        """Return the data prefix of a folder whose manifest is recorded as valid and unchanged; else None."""
        known = self._prefixes.get(folder)
        return known[1] if known is not None and stamp and known[0] == stamp else None


def _by_folder(listed: Collection[ListedObject]) -> dict[str, str]:
    stamps: dict[str, str] = {}
    for item in listed:
        folder, slash, rest = item.key.partition("/")
        if slash and not folder.startswith("."):
            stamps.setdefault(folder, "")
            if rest == MANIFEST:
                stamps[folder] = _stamp(item.tag, item.size)
    return stamps


def _differences(known: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str | None]:
    changed: dict[str, str | None] = dict.fromkeys(known.keys() - current.keys())
    return changed | {folder: stamp for folder, stamp in current.items() if known.get(folder) != stamp}
