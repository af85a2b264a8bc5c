"""The committed folders of an object store, from listings: which manifests there are, and what they point to.

A listing tells the tag of every manifest's content. A folder whose manifest was read before and
has the same tag points to the same data: it is not read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core.filenames import MANIFEST
from holdfast.storage.objects.calls import PAGE, Calls, Found, Listed
from holdfast.storage.objects.pins import prefix_named

_BEFORE = ".~"  # after all hidden names, before all others
_STEPS = "step-"
_PAGES = 4  # of a look for changes
_FILE = f"/{MANIFEST}"


def found_stamp(found: Found) -> str:
    """Return the stamp of a manifest as it was read."""
    return _stamp(found.version.get("e_tag", ""), len(found.data))


def _stamp(tag: str, size: int) -> str:
    return f"{tag}:{size}" if tag else ""  # without a tag it is read at every look


class Pointers:
    """The folders of one root."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._prefixes: dict[str, tuple[str, str]] = {}  # by folder: the stamp of a good manifest, and its data

    def stamps(self) -> dict[str, str]:
        """List every folder with the stamp of its manifest, "" for one without."""
        return _by_folder(self._calls.listed_after(_BEFORE))

    def first_folders(self) -> set[str]:
        """List the folders that come before the steps, as those do that were set aside, and some more."""
        found: set[str] = set()
        after = _BEFORE
        while True:
            page = self._calls.listed_after(after, one_page=True)
            found |= _by_folder(page).keys()
            if len(page) < PAGE or page[-1].key > _STEPS:
                return found
            after = page[-1].key

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        """Compare all folders if one or two requests list them, else the pages with the important ones."""
        if len(known) <= PAGE:
            return _differences(known, self.stamps())
        changed: dict[str, str | None] = {}
        names = sorted(known)
        waiting = sorted(set(important) & known.keys())
        for _ in range(_PAGES):
            if not waiting:
                break
            before = names[: names.index(waiting[0])][-1:]
            page = self._calls.listed_after(f"{before[0]}{_FILE}" if before else _BEFORE, one_page=True)
            last = page[-1].key.partition("/")[0] if len(page) >= PAGE else "\uffff"
            inside = {name: known[name] for name in names if (not before or name > before[0]) and name <= last}
            changed |= _differences(inside, _by_folder(page))
            waiting = [name for name in waiting if name > last]
        return changed

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        """Take over which attempt a good manifest names, from who has read it."""
        self._prefixes[folder] = (stamp, prefix_named(attempt) or folder)

    def prefix(self, folder: str, stamp: str) -> str | None:
        """Return where a folder's data is, if its manifest was known to be good and is the same; else None."""
        known = self._prefixes.get(folder)
        return known[1] if known is not None and stamp and known[0] == stamp else None


def _by_folder(listed: Collection[Listed]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in listed:
        folder, slash, rest = item.key.partition("/")
        if slash and not folder.startswith("."):
            found.setdefault(folder, "")
            if rest == MANIFEST:
                found[folder] = _stamp(item.tag, item.size)
    return found


def _differences(known: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    changed: dict[str, str | None] = dict.fromkeys(known.keys() - found.keys())
    return changed | {folder: stamp for folder, stamp in found.items() if known.get(folder) != stamp}
