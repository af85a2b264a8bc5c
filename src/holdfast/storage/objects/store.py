"""`ObjectStorage`: attempts under separate prefixes, published, renamed and removed by conditional puts.

An attempt's objects are stored under `<root>/.attempt-x/` and never move. The manifest at
`<root>/<folder>/holdfast.json` makes them a checkpoint: its field "attempt" names the prefix. The
conditional put succeeds only if the folder's manifest is missing or still the expected one.
`.open/<attempt>` marks an attempt as being written, `.removed/<prefix>` marks data for deletion.

Locks do not work across hosts. To exclude that one process discards an attempt and another
publishes it, the first closes the attempt and then checks whether it was published. The second
publishes the attempt and then checks whether it is still open.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.limits import JSON_BYTES
from holdfast.core.names import MANIFEST, check_file, manifest_attempt
from holdfast.storage.base import Stamped
from holdfast.storage.identity import IDENTITY, Identity, id_in, new_identity
from holdfast.storage.objects.address import Address
from holdfast.storage.objects.calls import Calls, ConditionFailed, VersionedObject
from holdfast.storage.objects.holds import HostHold, HostHolds
from holdfast.storage.objects.open_attempts import OpenAttempts
from holdfast.storage.objects.pins import ObjectPin, Pointer, pointer_bytes
from holdfast.storage.objects.pointers import Pointers, manifest_stamp
from holdfast.storage.objects.sweeping import Sweeper
from holdfast.storage.objects.transfer import ObjectReader, ObjectWriter

_REMOVED = ".removed"
_ATTEMPT, _MAIL = ".attempt-", ".mail-"
_TARGET = ".folder"  # under an attempt's prefix: the name of the folder it is published as
_IDENTITY_BYTES = 64 * 1024
_PAUSE_S = 0.2
_TRIES = 20


class ObjectStorage:
    """A root in S3, GCS, Azure, or a compatible store."""

    whole_files = True
    poll_s = 0.25

    def __init__(self, address: str | Address) -> None:
        self._address = address if isinstance(address, Address) else Address.parse(address)
        self._calls = Calls(self._address)
        self._holds = HostHolds(self._address.url)
        self._pointers = Pointers(self._calls)
        self._attempts = OpenAttempts(self._calls)
        self._sweeper = Sweeper(self._calls, self._holds, self._address, self)
        self._created: dict[str, set[str]] = {}  # by attempt: files that this process has created or announced
        self._manifests: dict[str, bytes] = {}
        self._uncertain: set[str] = set()  # prefixes with a put of unknown outcome

    @property
    def name(self) -> str:
        return self._address.url

    @property
    def address(self) -> str:
        return self._address.text

    def exists(self) -> bool:
        return self._calls.has_objects("")

    def identity(self, *, make: bool) -> Identity | None:
        for _ in range(_TRIES):
            try:
                stored = self._calls.get(IDENTITY, _IDENTITY_BYTES)
            except (NotFound, Damaged):
                stored = None
            root_id = id_in(stored.data) if stored is not None else None
            if root_id is not None or not make:
                return None if root_id is None else Identity(root_id, self.name)
            with contextlib.suppress(ConditionFailed):  # another process was faster: read its identity
                if stored is None:
                    self._calls.create(IDENTITY, new_identity())
                else:
                    self._calls.put_once(IDENTITY, new_identity(), stored.version)
        return None

    # Reading.

    def folders(self) -> list[str]:
        # Derived from objects, because some stores keep listing a prefix for a while after its last object is deleted.
        return sorted(self._pointers.stamps())

    def stamps(self) -> dict[str, str]:
        return self._pointers.stamps()

    def changes(self, known: Mapping[str, str], important: Collection[str]) -> dict[str, str | None]:
        return self._pointers.changes(known, important)

    def recall(self, folder: str, stamp: str, attempt: str) -> None:
        self._pointers.recall(folder, stamp, attempt)

    def read_stamped(self, folder: str, limit_bytes: int) -> Stamped:
        manifest = self._committed(folder)
        if manifest is None:
            raise NotFound(f"{self.name}/{folder} has no file {MANIFEST}")
        pin = ObjectPin(self._calls, self._holds, folder, Pointer.of(folder, manifest))
        return Stamped(pin.read(MANIFEST, limit_bytes), manifest_stamp(manifest), settled=True)

    def hidden(self) -> list[str]:
        return self._attempts.names()

    def pin(self, folder: str) -> ObjectPin:
        if folder.startswith("."):
            return ObjectPin(self._calls, self._holds, folder, Pointer(self._attempts.prefix(folder), None))
        return ObjectPin(self._calls, self._holds, folder, self._pointer(folder))

    def _pointer(self, folder: str) -> Pointer:
        """Return the pointer of a folder's manifest. A folder without a manifest contains its data."""
        for _ in range(_TRIES):
            manifest = self._committed(folder)
            if manifest is not None:
                return Pointer.of(folder, manifest)
            keys = [item.key for item in self._calls.list_objects(folder)]
            if not keys:
                raise NotFound(f"{self.name}/{folder}: no such folder")
            if f"{folder}/{MANIFEST}" not in keys:  # else it was published in the meantime
                return Pointer(folder, None)
        raise StorageError(f"{self.name}/{folder}: the manifest is listed but cannot be read")

    def files(self, folder: str) -> dict[str, int]:
        return self.pin(folder).files()

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        if name == MANIFEST and not folder.startswith("."):
            manifest = self._committed(folder)
            if manifest is None:
                raise NotFound(f"{self.name}/{folder} has no file {name}")
            return ObjectPin(self._calls, self._holds, folder, Pointer.of(folder, manifest)).read(name, limit_bytes)
        return self.pin(folder).read(name, limit_bytes)

    def entries(self, folder: str) -> list[str]:
        names = {item.key.removeprefix(f"{folder}/") for item in self._calls.list_objects(folder)}
        if not names and not folder.startswith("."):
            return []
        try:
            pin = self.pin(folder)
        except NotFound:
            return []
        return sorted(names - {MANIFEST} | set(pin.files()))

    # Attempts.

    def begin(self, attempt: str) -> None:
        self._attempts.begin(attempt)

    def _prefix(self, folder: str, *, fresh: bool = False) -> str:
        """Return the prefix of a folder's data, of an open attempt or a committed folder."""
        is_hidden = folder.startswith(".")
        return self._attempts.prefix(folder, fresh=fresh) if is_hidden else self._pointer(folder).prefix

    def _key(self, attempt: str, name: str, *, fresh: bool = False) -> str:
        check_file(name, self.name)
        return f"{self._prefix(attempt, fresh=fresh)}/{name}"

    def create(self, attempt: str, name: str, size: int) -> None:
        """Announce a file. No space is reserved: the object appears when its writer syncs."""
        self._key(attempt, name)
        created = self._created.setdefault(attempt, set())
        if name in created:
            raise StorageError(f"creating {self.name}/{attempt}/{name}: it already exists")
        created.add(name)

    def writer(self, attempt: str, name: str) -> ObjectWriter:
        return ObjectWriter(self._calls, self._key(attempt, name))

    def put(self, attempt: str, name: str, data: bytes) -> None:
        try:
            self._calls.create(self._key(attempt, name), data)
        except ConditionFailed:
            raise StorageError(f"creating {self.name}/{attempt}/{name}: it already exists") from None
        self._created.setdefault(attempt, set()).add(name)
        if name != MANIFEST:
            return
        if Pointer.of("", VersionedObject(data, {})).prefix == self._attempts.cached_prefix(attempt):
            self._manifests[attempt] = data  # `publish` puts it under the folder's name

    def take(self, attempt: str, name: str) -> ObjectReader:
        key = self._key(attempt, name)
        return ObjectReader(self._calls, key, self._calls.size(key))

    def drop(self, attempt: str, name: str) -> None:
        key = self._key(attempt, name)
        self._calls.size(key)
        self._calls.delete([key])
        self._created.get(attempt, set()).discard(name)

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        # Another process may discard a mailbox or an attempt. Notes that its creator still adds are swept later.
        fresh = folder.startswith((_MAIL, _ATTEMPT)) and not self._attempts.is_own(folder)
        self._calls.put(self._key(folder, name, fresh=fresh), data)

    def discard(self, attempt: str) -> None:
        with contextlib.suppress(StorageError, NotFound, Damaged):  # remaining data is swept later
            try:
                prefix = self._attempts.prefix(attempt, fresh=not self._attempts.is_own(attempt))
            except Damaged:
                self._close(attempt)  # its prefix is unknown: a sweep deletes the data under its name
                return
            if attempt.startswith(_MAIL):  # no folder ever points to a mailbox
                keys = [item.key for item in self._calls.list_objects(prefix)]
                self._close(attempt, *keys)
                return
            self._close(attempt)
            used = self.prefixes_in_use() if self._calls.exists(f"{prefix}/{_TARGET}") else set()
            if used is not None and prefix in used:
                return  # it was published, and possibly renamed since
            if used is None or prefix in self._uncertain:
                self._mark_removed(prefix, b"")  # a failed put may still arrive; a sweep checks again
                return
            self._calls.delete([item.key for item in self._calls.list_objects(prefix)])

    def _close(self, attempt: str, *keys: str) -> None:
        self._created.pop(attempt, None)
        self._manifests.pop(attempt, None)
        self._attempts.close(attempt, *keys)

    # Publishing.

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        prefix = self._attempts.prefix(attempt, fresh=True)
        data = self._manifests.get(attempt) or self._manifest(prefix)
        self._calls.put(f"{prefix}/{_TARGET}", folder.encode())
        before = self._committed(folder)
        if before is not None and aside:
            self._copy(before, folder, aside)
        try:
            self._swap(folder, prefix, data, before)
        except StorageError:
            if before is not None and aside:
                self._calls.delete([f"{aside}/{MANIFEST}"])  # the folder was not replaced
            raise
        if not self._attempts.is_open(attempt):
            self._unpublish(folder, prefix, before)
            raise StorageError(f"publishing {self.name}/{folder}: another process has discarded {attempt}")
        with contextlib.suppress(StorageError, NotFound):  # already published; a sweep cleans up the rest
            if before is not None and not aside:
                self._mark_removed(Pointer.of(folder, before).prefix, before.data)
            self._close(attempt)

    def _manifest(self, prefix: str) -> bytes:
        """Return the attempt's manifest if it names the prefix, else a pointer to the prefix."""
        try:
            manifest = self._calls.get(f"{prefix}/{MANIFEST}", JSON_BYTES)
        except NotFound:
            return pointer_bytes(prefix)
        return manifest.data if Pointer.of("", manifest).prefix == prefix else pointer_bytes(prefix)

    def _committed(self, folder: str) -> VersionedObject | None:
        """Return a folder's manifest; None if it has none."""
        try:
            return self._calls.get(f"{folder}/{MANIFEST}".lstrip("/"), JSON_BYTES)
        except NotFound:
            return None

    def _swap(self, folder: str, prefix: str, data: bytes, before: VersionedObject | None) -> None:
        """Commit by a conditional put. After an error, the stored manifest decides whether the put succeeded."""
        end = time.monotonic() + self._address.deadline_s
        while True:
            try:
                self._calls.put_once(f"{folder}/{MANIFEST}", data, before.version if before else None)
                return
            except StorageError as error:
                self._uncertain.add(prefix)
                now = self._committed(folder)
                if now is not None and Pointer.of(folder, now).prefix == prefix:
                    return  # the put succeeded, and the reply was lost
                if (now and now.data) != (before and before.data):
                    change = f"published {Pointer.of(folder, now).prefix} here" if now else "removed this folder"
                    raise StorageError(
                        f"publishing {self.name}/{folder}: another process has {change}; {prefix} was not published"
                    ) from error
                before = now
                if time.monotonic() > end or not self._calls.is_retryable(error):
                    raise
            time.sleep(_PAUSE_S)

    def _unpublish(self, folder: str, prefix: str, before: VersionedObject | None) -> None:
        """Undo the publication of a discarded attempt, unless another attempt has replaced it."""
        now = self._committed(folder)
        if now is None or Pointer.of(folder, now).prefix != prefix:
            return
        if before is None:
            self._calls.delete([f"{folder}/{MANIFEST}"])
        else:
            self._calls.put_once(f"{folder}/{MANIFEST}", before.data, now.version)

    def _copy(self, manifest: VersionedObject, folder: str, name: str) -> None:
        try:
            self._calls.create(f"{name}/{MANIFEST}", manifest.data)
        except ConditionFailed:
            raise self._name_taken(folder, name) from None

    def _name_taken(self, folder: str, name: str) -> StorageError:
        return StorageError(f"renaming {self.name}/{folder} to {name}: a folder of that name already exists")

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        manifest = self._committed(folder)
        self._check_attempt(folder, manifest, attempt)
        if manifest is None:
            self._pointer(folder)  # raises NotFound if the folder does not exist
            raise StorageError(f"renaming {self.name}/{folder}: it has no manifest, and objects cannot be moved")
        if self._calls.has_objects(name):
            raise self._name_taken(folder, name)
        self._copy(manifest, folder, name)
        if self._committed(folder) != manifest:
            self._calls.delete([f"{name}/{MANIFEST}"])
            raise NotFound(f"{self.name}/{folder} was replaced by another process")
        self._calls.delete([f"{folder}/{MANIFEST}"])

    def _check_attempt(self, folder: str, manifest: VersionedObject | None, attempt: str) -> None:
        """Raise NotFound unless a manifest was published by an attempt."""
        if attempt and (manifest is None or manifest_attempt(manifest.data) != attempt):
            raise NotFound(f"{self.name}/{folder} was not published by {attempt}")

    # Removing.

    def remove(self, folder: str, attempt: str = "") -> bool:
        pointer = self._pointer(folder)
        if attempt and manifest_attempt(pointer.data or b"") != attempt:
            raise NotFound(f"{self.name}/{folder} was not published by {attempt}")
        with self._holds.exclusive(pointer.prefix) as is_free:
            if not is_free:
                return False
            self._mark_removed(pointer.prefix, pointer.data or b"")
            if attempt:
                self._check_attempt(folder, self._committed(folder), attempt)
            keys = [f"{folder}/{MANIFEST}"]
            if pointer.prefix == folder:
                keys = [item.key for item in self._calls.list_objects(folder)]
            self._calls.delete(keys)
        return True

    def _mark_removed(self, prefix: str, manifest: bytes) -> None:
        """Mark a prefix's data for deletion after the grace period for readers on other hosts."""
        if prefix.startswith("."):
            self._calls.put(f"{_REMOVED}/{prefix}", manifest)

    def sweep(self) -> None:
        self._sweeper.run()

    def sweep_some(self, *, left: bool = False) -> None:
        self._sweeper.run_some(left=left)

    def prefixes_in_use(self) -> set[str] | None:
        """Return the prefixes of open attempts and of committed folders; None if they cannot be determined.

        The order matters: an attempt published in the meantime is found as open or as committed. A
        folder renamed in the meantime may be missed twice, and a damaged manifest names no prefix.
        """
        used = self._attempts.prefixes()
        stamps = self._pointers.stamps()
        for folder, stamp in stamps.items():
            prefix = self._pointers.prefix(folder, stamp) or self._committed_prefix(folder)
            if prefix is None:
                return None
            used.add(prefix)
        # A rename moves a folder to a name that sorts first, so a rename during the listing shows here.
        return used if self._pointers.first_folders() <= stamps.keys() else None

    def _committed_prefix(self, folder: str) -> str | None:
        """Return the data prefix of a committed folder; None if it cannot be determined."""
        try:
            pointer = self._pointer(folder)
        except NotFound:
            return None
        if pointer.data is not None and not self._calls.exists(f"{pointer.prefix}/{_TARGET}"):
            return None  # a damaged manifest: the prefix it named is unknown
        return pointer.prefix

    def hold(self, folder: str) -> HostHold:
        return self._holds.take(self._prefix(folder, fresh=True))

    def is_held(self, folder: str) -> bool:
        return self._holds.is_held(self._prefix(folder, fresh=True))
