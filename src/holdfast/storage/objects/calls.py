"""Calls to an object store: each with a deadline, retried where that is safe, failing as Holdfast's errors do.

obstore retries requests; what it gives up on is tried again here until the deadline of the call.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

from holdfast.core.errors import Damaged, NotFound, StorageError, Unsupported
from holdfast.core.masking import masked
from holdfast.storage.objects.address import Address

_T = TypeVar("_T")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_STATUS = re.compile(r"status code: (\d{3})")
_TRANSIENT = {408, 409, 425, 429}
_RETRIES = 4
_AT_ONCE = 500  # objects in one request to delete
PAGE = 1000  # objects in one reply to a listing


class Refused(StorageError):
    """A conditional put found another object than the condition says, or none."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object as it was read: its bytes and what a conditional put needs to replace exactly it."""

    data: bytes
    version: dict[str, str]


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing."""

    key: str
    size: int
    modified: datetime
    tag: str = ""  # of its content, where the store has one


def _obstore() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise Unsupported(
            f"object stores need the package obstore: pip install 'holdfast[objects]' ({error})"
        ) from None
    return obstore


def _told_options(url: str) -> dict[str, Any]:
    """Options of the connection that the environment has, such as AWS_ALLOW_HTTP; obstore drops them beside its own."""
    vendor = {"s3": "AWS", "gs": "GOOGLE"}.get(url[:2], "AZURE")
    told: dict[str, Any] = {}
    for name in ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes", "user_agent"):
        value = os.environ.get(f"{vendor}_{name.upper()}")
        if value is not None:
            told[name] = value.lower() in ("1", "true", "yes", "on") if name.startswith("allow") else value
    return told


class Calls:
    """The calls of one root. Keys are relative to it."""

    def __init__(self, address: Address) -> None:
        self._obstore = _obstore()
        self._errors: Any = self._obstore.exceptions
        self.url = address.url
        self.deadline_s = address.deadline_s
        span = timedelta(seconds=min(address.timeout_s, address.deadline_s))
        try:
            self._store = self._obstore.store.from_url(
                address.url,
                client_options={
                    "timeout": span,
                    "connect_timeout": min(span, timedelta(seconds=10)),
                    **_told_options(address.url),
                },
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=address.deadline_s),
                    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
                },
            )
        except (self._errors.BaseError, ValueError, TypeError) as error:
            raise StorageError(f"{address.url}: {_brief(error)}") from without_secrets(error)

    def tried(self, doing: str, key: str, call: Callable[[], _T]) -> _T:
        """Do what can be done twice, again and again until it works or its deadline has passed."""
        end = time.monotonic() + self.deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:  # noqa: BLE001  (each is raised again, as ours)
                meaning = self._meaning(doing, key, error)
                if not self._is_transient(error) or time.monotonic() + pause > end:
                    raise meaning from without_secrets(error)
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  (so that ranks do not keep step)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def _meaning(self, doing: str, key: str, error: Exception) -> Exception:
        """The error that a caller of the storage sees; what the store has no part in is raised as it is."""
        what = f"{doing} {self.url}/{key}"
        if isinstance(error, FileNotFoundError):
            return error if isinstance(error, NotFound) else NotFound(f"{what}: there is no such object")
        if isinstance(error, StorageError | Damaged):
            return error
        if isinstance(error, self._errors.AlreadyExistsError | self._errors.PreconditionError):
            return Refused(f"{what}: it is not what the condition says")
        if isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError):
            return StorageError(f"{what}: the store refuses these credentials: {_brief(error)}")
        if isinstance(error, self._errors.BaseError | OSError):
            return StorageError(f"{what}: {_hint(str(error), self.url)}{_brief(error)}")
        raise error

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, Short):
            return True
        text = str(error)
        if isinstance(error, self._errors.AlreadyExistsError | self._errors.PreconditionError):
            return "status code: 409" in text  # another call was under way; that there is another object is 412
        if not isinstance(error, self._errors.GenericError | self._errors.JoinError):
            return isinstance(error, ConnectionError | TimeoutError)
        if "builder error" in text:
            return False  # nothing was sent: http without AWS_ALLOW_HTTP, or an address that is none
        status = _STATUS.search(text)
        return status is None or int(status[1]) >= 500 or int(status[1]) in _TRANSIENT

    def may_pass(self, error: BaseException) -> bool:
        """Whether what went wrong may go well if it is tried again."""
        cause = error.__cause__
        refused = isinstance(error, Refused)
        return refused or (isinstance(cause, Exception) and self._is_transient(cause))

    def find(self, key: str, limit_bytes: int) -> Found:
        """A whole object with its version; raises NotFound, and Damaged if it is over the limit."""

        def get() -> Found:
            reply = self._store.get(key)
            meta = reply.meta
            if meta["size"] > limit_bytes:
                raise Damaged(f"{self.url}/{key}: {meta['size']} bytes, more than the limit of {limit_bytes}")
            data = bytes(reply.bytes())
            if len(data) != meta["size"]:
                raise Short(f"reading {self.url}/{key}: {len(data)} of {meta['size']} bytes came")
            return Found(data, {name: str(meta[name]) for name in ("e_tag", "version") if meta[name]})

        return self.tried("reading", key, get)

    def read(self, key: str, offset: int, size: int) -> memoryview:
        """Bytes of an object; a reply that is too short is asked for again."""

        def get() -> memoryview:
            data = memoryview(self._store.get_range(key, start=offset, length=size))
            if data.nbytes != size:
                raise Short(f"reading {self.url}/{key} at {offset}: {data.nbytes} of {size} bytes came")
            return data

        return self.tried("reading", key, get)

    def size(self, key: str) -> int:
        return int(self.tried("looking at", key, lambda: self._store.head(key))["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFound:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        """Write a small object, replacing an older one."""
        self.tried("writing", key, lambda: self._store.put(key, data, use_multipart=False))

    def put_once(self, key: str, data: bytes, version: dict[str, str] | None) -> None:
        """Write an object if there is none, or just this version; one try, since its reply may be lost.

        Raises Refused if the store says no, another StorageError if it is not known what it did.
        """
        try:
            self._store.put(key, data, mode="create" if version is None else version, use_multipart=False)
        except Exception as error:  # noqa: BLE001  (the same)
            raise self._meaning("writing", key, error) from without_secrets(error)

    def create(self, key: str, data: bytes) -> None:
        """Write an object that is not there yet; raises Refused if there is another."""

        def put() -> None:
            try:
                self.put_once(key, data, None)
            except StorageError as error:
                try:
                    if self.find(key, max(len(data), 1 << 16)).data == data:
                        return  # it was written, and the reply got lost
                except (NotFound, Damaged):
                    pass  # another one, or none: what the store said stands
                raise (error.__cause__ if isinstance(error.__cause__, Exception) else error) from None

        self.tried("writing", key, put)

    def listed(self, prefix: str) -> list[Listed]:
        """Every object under a prefix, at any depth."""

        def look() -> list[Listed]:
            return [_listed(item) for chunk in self._store.list(prefix or None, chunk_size=PAGE) for item in chunk]

        return self.tried("listing", prefix, look)

    def listed_after(self, key: str, *, one_page: bool = False) -> list[Listed]:
        """Every object whose key comes after a key, in order; with `one_page` as many as one request gives."""

        def look() -> list[Listed]:
            chunks = self._store.list(None, offset=key, chunk_size=PAGE)
            return [_listed(item) for chunk in (islice(chunks, 1) if one_page else chunks) for item in chunk]

        return self.tried("listing", key, look)

    def any_under(self, prefix: str) -> bool:
        """Whether there is any object under a prefix."""

        def look() -> bool:
            return any(bool(chunk) for chunk in self._store.list(prefix or None, chunk_size=1))

        return self.tried("listing", prefix, look)

    def prefixes(self) -> list[str]:
        """The first parts of all keys that have several."""
        found = self.tried("listing", "", lambda: self._store.list_with_delimiter(None))
        return sorted(found["common_prefixes"])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are no error."""
        for at in range(0, len(keys), _AT_ONCE):
            some = list(keys[at : at + _AT_ONCE])
            try:
                self.tried("deleting", some[0], lambda some=some: self._store.delete(some))  # type: ignore[misc]
            except NotFound:
                continue

    def upload(self, key: str, part_bytes: int, at_once: int) -> Any:
        """A file to write an object with, in parts of which a few travel at once."""
        return self.tried(
            "writing",
            key,
            lambda: self._obstore.open_writer(self._store, key, buffer_size=part_bytes, max_concurrency=at_once),
        )

    def failing(self, doing: str, key: str, error: Exception) -> Exception:
        """What an error of an upload means to a caller."""
        return self._meaning(doing, key, error)


class Short(StorageError):
    """A reply with fewer bytes than were asked for."""


def _listed(item: Any) -> Listed:
    return Listed(item["path"], item["size"], item["last_modified"], item["e_tag"] or "")


def _hint(text: str, url: str) -> str:
    """What an error of the store most likely means, where its own words do not say."""
    if "builder error" in text:
        return "nothing was sent: an endpoint with http:// needs AWS_ALLOW_HTTP=true; "
    if "NoSuchBucket" in text:
        return f"there is no bucket {url.split('/')[2]!r}; "
    if re.search(r"status code: 40[13]", text):
        return "the store refuses these credentials; "
    return ""


def _brief(error: BaseException) -> str:
    """The first line of what obstore says; the rest is for its makers."""
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line), type(error).__name__)
    return masked(first.partition(": <?xml")[0])[:300]


def without_secrets(error: Exception) -> Exception:
    """The error of a store for a traceback: requests carry signatures and tokens in their addresses.

    An error that repeats one is made again with the secret masked, as the same kind where that is possible.
    """
    text = str(error)
    if masked(text) == text:
        return error
    try:
        return type(error)(masked(text))
    except TypeError:  # its kind cannot be made from a text
        return StorageError(f"{type(error).__name__}: {masked(text)}")
