"""Object stores: data under a prefix of its own, published by one conditional put.

An attempt's objects lie under `<root>/.attempt-x/` and never move. What makes them a checkpoint
is the manifest at `<root>/<folder>/holdfast.json`, whose field "attempt" names the prefix: it is
put there if there is none, or if there is still the one that was seen. `.open/<attempt>` says
that an attempt is being written; `.removed/<prefix>` that its data may go after a while.

No locks reach across hosts. So that who discards an attempt and who publishes it never both
succeed, the one closes it and then looks whether it is published, the other publishes it and
then looks whether it is still open.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Collection, Mapping

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.filenames import MANIFEST, check_file, is_plain, manifest_attempt
from holdfast.core.limits import JSON_BYTES
from holdfast.storage.base import Stamped
from holdfast.storage.identity import IDENTITY, Identity, id_in, new_identity
from holdfast.storage.objects.address import Address
from holdfast.storage.objects.calls import Calls, Found, Refused
from holdfast.storage.objects.holds import HostHold, HostHolds
from holdfast.storage.objects.pins import ObjectPin, Pointer, pointer_bytes
from holdfast.storage.objects.pointers import Pointers, found_stamp
from holdfast.storage.objects.sweeping import Sweeper
from holdfast.storage.objects.transfer import ObjectReader, ObjectWriter

OPEN, REMOVED = ".open", ".removed"
_ATTEMPT, _MAIL = ".attempt-", ".mail-"
_TARGET = ".folder"  # in an attempt's prefix: the folder that it is published as
_UNIQUE = re.compile(r"\.attempt-[0-9a-f]{16}")
_SMALL_BYTES = 64 * 1024
_PAUSE_S = 0.2
_LOOKS = 20


class ObjectStorage:
    """A root in S3, GCS or Azure, or in what speaks as they do."""

    whole_files = True
    poll_s = 0.25

    def __init__(self, address: str | Address) -> None:
        self._address = address if isinstance(address, Address) else Address.parse(address)
        self._calls = Calls(self._address)
        self._holds = HostHolds(self._address.url)
        self._pointers = Pointers(self._calls)
        self._sweeps = Sweeper(self._calls, self._holds, self._address, self)
        self._opened: dict[str, str] = {}
        self._begun: set[str] = set()  # those that this process has begun itself
        self._made: dict[str, set[str]] = {}  # by attempt: the files that this process has made or announced
        self._manifests: dict[str, bytes] = {}
        self._open_tags: dict[str, tuple[str, str]] = {}  # by what is open: the tag of that note, and the prefix
        self._uncertain: set[str] = set()

    @property
    def name(self) -> str:
        return self._address.url

    @property
    def address(self) -> str:
        return self._address.text

    def exists(self) -> bool:
        return self._calls.any_under("")

    def identity(self, *, make: bool) -> Identity | None:
        for _ in range(_LOOKS):
            try:
                found = self._calls.find(IDENTITY, _SMALL_BYTES)
            except (NotFound, Damaged):
                found = None
            known = id_in(found.data) if found is not None else None
            if known is not None or not make:
                return None if known is None else Identity(known, self.name)
            with contextlib.suppress(Refused):  # another was faster: read that one
                if found is None:
                    self._calls.create(IDENTITY, new_identity())
                else:
                    self._calls.put_once(IDENTITY, new_identity(), found.version)
        return None

    # Looking.

    def folders(self) -> list[str]:
        # By their objects: some stores go on listing a prefix for a while when there is nothing under it any more.
        return sorted(self._pointers.stamps())

    def stamps(self) -> dict[str, str]:
        return self._pointers.stamps()

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        return self._pointers.changes(known, important)

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        self._pointers.recall(folder, stamp, attempt)

    def read_stamped(self, folder: str, limit_bytes: int) -> Stamped:
        found = self._committed(folder)
        if found is None:
            raise NotFound(f"{self.name}/{folder} has no file {MANIFEST}")
        pin = ObjectPin(self._calls, self._holds, folder, Pointer.of(folder, found))
        return Stamped(pin.read(MANIFEST, limit_bytes), found_stamp(found), settled=True)

    def hidden(self) -> list[str]:
        return sorted(item.key.removeprefix(f"{OPEN}/") for item in self._calls.listed(OPEN))

    def pin(self, folder: str) -> ObjectPin:
        if folder.startswith("."):
            return ObjectPin(self._calls, self._holds, folder, Pointer(self._prefix(folder), None))
        return ObjectPin(self._calls, self._holds, folder, self._pointer(folder))

    def _pointer(self, folder: str) -> Pointer:
        """What a folder's manifest points to; a folder without one is its own data."""
        for _ in range(_LOOKS):
            found = self._committed(folder)
            if found is not None:
                return Pointer.of(folder, found)
            keys = [item.key for item in self._calls.listed(folder)]
            if not keys:
                raise NotFound(f"{self.name}/{folder}: there is no such folder")
            if f"{folder}/{MANIFEST}" not in keys:  # else it was published since we looked
                return Pointer(folder, None)
        raise StorageError(f"{self.name}/{folder}: its manifest is listed, and cannot be read")

    def files(self, folder: str) -> dict[str, int]:
        return self.pin(folder).files()

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        if name == MANIFEST and not folder.startswith("."):
            found = self._committed(folder)
            if found is None:
                raise NotFound(f"{self.name}/{folder} has no file {name}")
            return ObjectPin(self._calls, self._holds, folder, Pointer.of(folder, found)).read(name, limit_bytes)
        return self.pin(folder).read(name, limit_bytes)

    def entries(self, folder: str) -> list[str]:
        beside = {item.key.removeprefix(f"{folder}/") for item in self._calls.listed(folder)}
        if not beside and not folder.startswith("."):
            return []
        try:
            pin = self.pin(folder)
        except NotFound:
            return []
        return sorted(beside - {MANIFEST} | set(pin.files()))

    # Attempts.

    def begin(self, attempt: str) -> None:
        # Data never moves, and a pin may still read it: a name that may come again gets another prefix.
        unique = _UNIQUE.fullmatch(attempt) and not self._calls.any_under(attempt)
        prefix = attempt if unique else f"{attempt}-{secrets.token_hex(4)}"
        opened = json.dumps({"data": prefix, "nonce": secrets.token_hex(8)}).encode()
        try:
            self._calls.create(f"{OPEN}/{attempt}", opened)
        except Refused:
            raise StorageError(f"making {self.name}/{attempt}: it is there already") from None
        self._opened[attempt] = prefix
        self._begun.add(attempt)

    def _prefix(self, attempt: str, *, fresh: bool = False) -> str:
        """Where an open attempt's data lies; raises NotFound if it is not open."""
        if fresh or attempt not in self._opened:
            self._opened.pop(attempt, None)
            try:
                found = self._calls.find(f"{OPEN}/{attempt}", _SMALL_BYTES)
            except NotFound:
                raise NotFound(f"{self.name} has no folder {attempt}") from None
            try:
                prefix = str(json.loads(found.data)["data"])
            except (ValueError, KeyError, TypeError):
                raise Damaged(f"{self.name}/{OPEN}/{attempt} does not say where its data is") from None
            if not prefix.startswith(attempt) or not is_plain(prefix.lstrip(".")) or "/" in prefix:
                raise Damaged(f"{self.name}/{OPEN}/{attempt} points to {prefix[:80]!r}")
            self._opened[attempt] = prefix
        return self._opened[attempt]

    def _key(self, attempt: str, name: str, *, fresh: bool = False) -> str:
        check_file(name, self.name)
        prefix = self._prefix(attempt, fresh=fresh) if attempt.startswith(".") else self._pointer(attempt).prefix
        return f"{prefix}/{name}"

    def create(self, attempt: str, name: str, size: int) -> None:
        """Nothing can be reserved: an object appears when its writer syncs it."""
        self._key(attempt, name)
        made = self._made.setdefault(attempt, set())
        if name in made:
            raise StorageError(f"making {self.name}/{attempt}/{name}: it is there already")
        made.add(name)

    def writer(self, attempt: str, name: str) -> ObjectWriter:
        return ObjectWriter(self._calls, self._key(attempt, name))

    def put(self, attempt: str, name: str, data: bytes) -> None:
        try:
            self._calls.create(self._key(attempt, name), data)
        except Refused:
            raise StorageError(f"making {self.name}/{attempt}/{name}: it is there already") from None
        self._made.setdefault(attempt, set()).add(name)
        if name == MANIFEST and Pointer.of("", Found(data, {})).prefix == self._opened.get(attempt):
            self._manifests[attempt] = data  # what `publish` puts under the folder's name

    def take(self, attempt: str, name: str) -> ObjectReader:
        key = self._key(attempt, name)
        return ObjectReader(self._calls, key, self._calls.size(key))

    def drop(self, attempt: str, name: str) -> None:
        key = self._key(attempt, name)
        self._calls.size(key)
        self._calls.delete([key])
        self._made.get(attempt, set()).discard(name)

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        # Others may discard a mailbox or an attempt. Notes that its own maker puts there all the same are swept later.
        fresh = folder.startswith((_MAIL, _ATTEMPT)) and folder not in self._begun
        self._calls.put(self._key(folder, name, fresh=fresh), data)

    def discard(self, attempt: str) -> None:
        with contextlib.suppress(StorageError, NotFound, Damaged):  # what stays is swept later
            try:
                prefix = self._prefix(attempt, fresh=attempt not in self._begun)
            except Damaged:
                self._close(attempt)  # it does not say where its data is: what there is under its name is swept
                return
            if attempt.startswith(_MAIL):  # no folder ever points to a mailbox
                keys = [item.key for item in self._calls.listed(prefix)]
                self._close(attempt, *keys)
                return
            self._close(attempt)
            used = self.prefixes_in_use() if self._calls.exists(f"{prefix}/{_TARGET}") else set()
            if used is not None and prefix in used:
                return  # it was published, under whatever name it is known now
            if used is None or prefix in self._uncertain:
                self._bury(prefix, b"")  # a put that was given up may yet arrive; a sweep looks again
                return
            self._calls.delete([item.key for item in self._calls.listed(prefix)])

    def _close(self, attempt: str, *keys: str) -> None:
        self._opened.pop(attempt, None)
        self._begun.discard(attempt)
        self._made.pop(attempt, None)
        self._manifests.pop(attempt, None)
        self._open_tags.pop(attempt, None)
        self._calls.delete([f"{OPEN}/{attempt}", *keys])

    # Publishing.

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        prefix = self._prefix(attempt, fresh=True)
        data = self._manifests.get(attempt) or self._manifest(prefix)
        self._calls.put(f"{prefix}/{_TARGET}", folder.encode())
        before = self._committed(folder)
        if before is not None and aside:
            self._copy(before, folder, aside)
        try:
            self._swap(folder, prefix, data, before)
        except StorageError:
            if before is not None and aside:
                self._calls.delete([f"{aside}/{MANIFEST}"])  # it still stands where it was
            raise
        if not self._calls.exists(f"{OPEN}/{attempt}"):
            self._take_back(folder, prefix, before)
            raise StorageError(f"publishing {self.name}/{folder}: {attempt} was discarded meanwhile")
        with contextlib.suppress(StorageError, NotFound):  # it is published: what is left is for a sweep
            if before is not None and not aside:
                self._bury(Pointer.of(folder, before).prefix, before.data)
            self._close(attempt)

    def _manifest(self, prefix: str) -> bytes:
        """What names the prefix: the attempt's manifest, or a pointer where it has none that does."""
        try:
            found = self._calls.find(f"{prefix}/{MANIFEST}", JSON_BYTES)
        except NotFound:
            return pointer_bytes(prefix)
        return found.data if Pointer.of("", found).prefix == prefix else pointer_bytes(prefix)

    def _committed(self, folder: str) -> Found | None:
        try:
            return self._calls.find(f"{folder}/{MANIFEST}".lstrip("/"), JSON_BYTES)
        except NotFound:
            return None

    def _swap(self, folder: str, prefix: str, data: bytes, before: Found | None) -> None:
        """The commit. Whatever the store answers, what counts is what is there afterwards."""
        end = time.monotonic() + self._address.deadline_s
        while True:
            try:
                self._calls.put_once(f"{folder}/{MANIFEST}", data, before.version if before else None)
                return
            except StorageError as error:
                self._uncertain.add(prefix)
                now = self._committed(folder)
                if now is not None and Pointer.of(folder, now).prefix == prefix:
                    return  # it was done, and the answer got lost
                if (now and now.data) != (before and before.data):
                    other = Pointer.of(folder, now).prefix if now else "nobody"
                    raise StorageError(
                        f"publishing {self.name}/{folder}: {other} was published under this name meanwhile; "
                        f"{prefix} is not"
                    ) from error
                before = now
                if time.monotonic() > end or not self._calls.may_pass(error):
                    raise
            time.sleep(_PAUSE_S)

    def _take_back(self, folder: str, prefix: str, before: Found | None) -> None:
        """Undo a publication of what is being discarded, unless another one took its place already."""
        now = self._committed(folder)
        if now is None or Pointer.of(folder, now).prefix != prefix:
            return
        if before is None:
            self._calls.delete([f"{folder}/{MANIFEST}"])
        else:
            self._calls.put_once(f"{folder}/{MANIFEST}", before.data, now.version)

    def _copy(self, found: Found, folder: str, name: str) -> None:
        try:
            self._calls.create(f"{name}/{MANIFEST}", found.data)
        except Refused:
            raise StorageError(f"renaming {self.name}/{folder} to {name}: there is such a folder") from None

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        found = self._committed(folder)
        self._require(folder, found, attempt)
        if found is None:
            self._pointer(folder)  # raises NotFound if there is no such folder
            raise StorageError(f"renaming {self.name}/{folder}: it has no manifest, and objects cannot be moved")
        if self._calls.any_under(name):
            raise StorageError(f"renaming {self.name}/{folder} to {name}: there is such a folder")
        self._copy(found, folder, name)
        if self._committed(folder) != found:
            self._calls.delete([f"{name}/{MANIFEST}"])
            raise NotFound(f"{self.name}/{folder} was replaced meanwhile")
        self._calls.delete([f"{folder}/{MANIFEST}"])

    def _require(self, folder: str, found: Found | None, attempt: str) -> None:
        """Raise NotFound unless a manifest is what an attempt published."""
        if attempt and (found is None or manifest_attempt(found.data) != attempt):
            raise NotFound(f"{self.name}/{folder} is not of {attempt} now")

    # Removing.

    def remove(self, folder: str, attempt: str = "") -> bool:
        pointer = self._pointer(folder)
        if attempt and manifest_attempt(pointer.data or b"") != attempt:
            raise NotFound(f"{self.name}/{folder} is not of {attempt} now")
        with self._holds.alone(pointer.prefix) as alone:
            if not alone:
                return False
            self._bury(pointer.prefix, pointer.data or b"")
            if attempt:
                self._require(folder, self._committed(folder), attempt)
            whole = pointer.prefix == folder
            self._calls.delete([item.key for item in self._calls.listed(folder)] if whole else [f"{folder}/{MANIFEST}"])
        return True

    def _bury(self, prefix: str, manifest: bytes) -> None:
        """Say that a prefix's data may go, after the time that readers on other hosts are given."""
        if prefix.startswith("."):
            self._calls.put(f"{REMOVED}/{prefix}", manifest)

    def sweep(self) -> None:
        self._sweeper().run()

    def sweep_some(self, *, left: bool = False) -> None:
        self._sweeper().run_some(left=left)

    def _sweeper(self) -> Sweeper:
        return self._sweeps

    def prefixes_in_use(self) -> set[str] | None:
        """The data prefixes that are being written or that some folder points to; None if it cannot be told.

        Looked at in this order, what is published meanwhile is found in one place or the other.
        What is renamed meanwhile may be missed in both, and a damaged manifest points nowhere.
        """
        used = set()
        for item in self._calls.listed(OPEN):
            attempt = item.key.removeprefix(f"{OPEN}/")
            known = self._open_tags.get(attempt)
            with contextlib.suppress(NotFound):
                prefix = known[1] if known and item.tag and known[0] == item.tag else self._prefix(attempt, fresh=True)
                used.add(prefix)
                self._open_tags[attempt] = (item.tag, prefix)
        stamps = self._pointers.stamps()
        for folder, stamp in stamps.items():
            pointed = self._pointers.prefix(folder, stamp) or self._prefix_of(folder)
            if pointed is None:
                return None
            used.add(pointed)
        # A rename goes to a name that comes first, so that one during a long listing shows here.
        return used if self._pointers.first_folders() <= stamps.keys() else None

    def _prefix_of(self, folder: str) -> str | None:
        """Where a folder's data is, by its manifest; None if that cannot be told."""
        try:
            pointer = self._pointer(folder)
        except NotFound:
            return None
        if pointer.data is not None and not self._calls.exists(f"{pointer.prefix}/{_TARGET}"):
            return None  # a damaged manifest: what it pointed to is not known
        return pointer.prefix

    def hold(self, folder: str) -> HostHold:
        return self._holds.take(self._held_name(folder))

    def is_held(self, folder: str) -> bool:
        return self._holds.is_held(self._held_name(folder))

    def _held_name(self, folder: str) -> str:
        return self._prefix(folder, fresh=True) if folder.startswith(".") else self._pointer(folder).prefix
