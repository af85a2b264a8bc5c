"""Requests to an object store (get, put, list, delete): deadlines, retries, conditional puts, translated errors.

obstore retries single requests. A call that still fails is retried here until its deadline.
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
_DELETE_BATCH = 500  # objects in one delete request
PAGE = 1000  # objects in one reply to a list request


class ConditionFailed(StorageError):
    """A conditional put was refused, because the object is not the expected one."""


@dataclass(frozen=True, slots=True)
class VersionedObject:
    """An object's contents, with the version that a conditional put needs to replace exactly this object."""

    data: bytes
    version: dict[str, str]


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing."""

    key: str
    size: int
    modified: datetime
    tag: str = ""  # the content's etag, if the store has one


def _obstore() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise Unsupported(
            f"object stores need the package obstore; install it with pip install 'holdfast[objects]' ({error})"
        ) from None
    return obstore


def _environment_options(url: str) -> dict[str, Any]:
    """Return connection options from the environment, such as AWS_ALLOW_HTTP.

    obstore ignores these variables when it receives any client options.
    """
    vendor = {"s3": "AWS", "gs": "GOOGLE"}.get(url[:2], "AZURE")
    options: dict[str, Any] = {}
    for name in ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes", "user_agent"):
        value = os.environ.get(f"{vendor}_{name.upper()}")
        if value is not None:
            options[name] = value.lower() in ("1", "true", "yes", "on") if name.startswith("allow") else value
    return options


class Calls:
    """Calls for one root. Keys are relative to the root."""

    def __init__(self, address: Address) -> None:
        self._obstore = _obstore()
        self._errors: Any = self._obstore.exceptions
        self.url = address.url
        self.deadline_s = address.deadline_s
        timeout = timedelta(seconds=min(address.timeout_s, address.deadline_s))
        try:
            self._store = self._obstore.store.from_url(
                address.url,
                client_options={
                    "timeout": timeout,
                    "connect_timeout": min(timeout, timedelta(seconds=10)),
                    **_environment_options(address.url),
                },
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=address.deadline_s),
                    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
                },
            )
        except (self._errors.BaseError, ValueError, TypeError) as error:
            raise StorageError(f"{address.url}: {_brief(error)}") from without_secrets(error)

    def retry(self, doing: str, key: str, call: Callable[[], _T]) -> _T:
        """Repeat an idempotent call until it succeeds or its deadline has passed."""
        end = time.monotonic() + self.deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:  # noqa: BLE001  (every error is raised again, translated)
                translated = self.translate(doing, key, error)
                if not self._is_transient(error) or time.monotonic() + pause > end:
                    raise translated from without_secrets(error)
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  (jitter, so that ranks do not retry in lockstep)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def translate(self, doing: str, key: str, error: Exception) -> Exception:
        """Return Holdfast's error for an error of the store. Other errors are raised unchanged."""
        what = f"{doing} {self.url}/{key}"
        if isinstance(error, FileNotFoundError):
            return error if isinstance(error, NotFound) else NotFound(f"{what}: no such object")
        if isinstance(error, StorageError | Damaged):
            return error
        if isinstance(error, self._errors.AlreadyExistsError | self._errors.PreconditionError):
            return ConditionFailed(f"{what}: the object is not the expected version")
        if isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError):
            return StorageError(f"{what}: the store rejects these credentials: {_brief(error)}")
        if isinstance(error, self._errors.BaseError | OSError):
            return StorageError(f"{what}: {_hint(str(error), self.url)}{_brief(error)}")
        raise error

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, ShortReply):
            return True
        text = str(error)
        if isinstance(error, self._errors.AlreadyExistsError | self._errors.PreconditionError):
            return "status code: 409" in text  # a concurrent call; an unexpected object is 412
        if not isinstance(error, self._errors.GenericError | self._errors.JoinError):
            return isinstance(error, ConnectionError | TimeoutError)
        if "builder error" in text:
            return False  # no request was sent: http without AWS_ALLOW_HTTP, or an invalid address
        status = _STATUS.search(text)
        return status is None or int(status[1]) >= 500 or int(status[1]) in _TRANSIENT

    def is_retryable(self, error: BaseException) -> bool:
        """Return True if the failed call may succeed if repeated."""
        cause = error.__cause__
        return isinstance(error, ConditionFailed) or (isinstance(cause, Exception) and self._is_transient(cause))

    def get(self, key: str, limit_bytes: int) -> VersionedObject:
        """Return a whole object with its version. Raises NotFound, or Damaged if the object exceeds the limit."""

        def request() -> VersionedObject:
            reply = self._store.get(key)
            meta = reply.meta
            if meta["size"] > limit_bytes:
                raise Damaged(f"{self.url}/{key}: {meta['size']} bytes, more than the limit of {limit_bytes}")
            data = bytes(reply.bytes())
            if len(data) != meta["size"]:
                raise ShortReply(f"reading {self.url}/{key}: {len(data)} of {meta['size']} bytes received")
            return VersionedObject(data, {name: str(meta[name]) for name in ("e_tag", "version") if meta[name]})

        return self.retry("reading", key, request)

    def read(self, key: str, offset: int, size: int) -> memoryview:
        """Return a range of an object. A short reply is requested again."""

        def request() -> memoryview:
            data = memoryview(self._store.get_range(key, start=offset, length=size))
            if data.nbytes != size:
                raise ShortReply(f"reading {self.url}/{key} at {offset}: {data.nbytes} of {size} bytes received")
            return data

        return self.retry("reading", key, request)

    def size(self, key: str) -> int:
        return int(self.retry("checking", key, lambda: self._store.head(key))["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFound:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        """Write a small object, replacing an existing one."""
        self.retry("writing", key, lambda: self._store.put(key, data, use_multipart=False))

    def put_once(self, key: str, data: bytes, version: dict[str, str] | None) -> None:
        """Write an object if it does not exist, or still has `version`. Tried once, because a reply may be lost.

        Raises ConditionFailed if the store refuses, another StorageError if the outcome is unknown.
        """
        try:
            self._store.put(key, data, mode="create" if version is None else version, use_multipart=False)
        except Exception as error:  # noqa: BLE001  (as above)
            raise self.translate("writing", key, error) from without_secrets(error)

    def create(self, key: str, data: bytes) -> None:
        """Write a new object. Raises ConditionFailed if another one exists."""

        def put() -> None:
            try:
                self.put_once(key, data, None)
            except StorageError as error:
                try:
                    if self.get(key, max(len(data), 1 << 16)).data == data:
                        return  # the object was written, and the reply was lost
                except (NotFound, Damaged):
                    pass  # another object or none: the store's error stands
                raise (error.__cause__ if isinstance(error.__cause__, Exception) else error) from None

        self.retry("writing", key, put)

    def list_objects(self, prefix: str) -> list[ListedObject]:
        """Return every object under a prefix, at any depth."""

        def request() -> list[ListedObject]:
            return [
                _listed_object(item) for chunk in self._store.list(prefix or None, chunk_size=PAGE) for item in chunk
            ]

        return self.retry("listing", prefix, request)

    def list_after(self, key: str, *, one_page: bool = False) -> list[ListedObject]:
        """Return the objects whose keys sort after a key, in order. With `one_page`, only one request is made."""

        def request() -> list[ListedObject]:
            chunks = self._store.list(None, offset=key, chunk_size=PAGE)
            return [_listed_object(item) for chunk in (islice(chunks, 1) if one_page else chunks) for item in chunk]

        return self.retry("listing", key, request)

    def has_objects(self, prefix: str) -> bool:
        """Return True if any object exists under a prefix."""

        def request() -> bool:
            return any(bool(chunk) for chunk in self._store.list(prefix or None, chunk_size=1))

        return self.retry("listing", prefix, request)

    def prefixes(self) -> list[str]:
        """Return the first segment of every key that has more than one."""
        listing = self.retry("listing", "", lambda: self._store.list_with_delimiter(None))
        return sorted(listing["common_prefixes"])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. A missing object is not an error."""
        for at in range(0, len(keys), _DELETE_BATCH):
            batch = list(keys[at : at + _DELETE_BATCH])
            try:
                self.retry("deleting", batch[0], lambda batch=batch: self._store.delete(batch))  # type: ignore[misc]
            except NotFound:
                continue

    def upload(self, key: str, part_bytes: int, at_once: int) -> Any:
        """Return a file object that uploads in parts, `at_once` of them concurrently."""
        return self.retry(
            "writing",
            key,
            lambda: self._obstore.open_writer(self._store, key, buffer_size=part_bytes, max_concurrency=at_once),
        )


class ShortReply(StorageError):
    """A reply with fewer bytes than requested."""


def _listed_object(item: Any) -> ListedObject:
    return ListedObject(item["path"], item["size"], item["last_modified"], item["e_tag"] or "")


def _hint(text: str, url: str) -> str:
    """Return the likely cause of a store's error, if its own message does not name the cause."""
    if "builder error" in text:
        return "no request was sent: an endpoint with http:// needs AWS_ALLOW_HTTP=true; "
    if "NoSuchBucket" in text:
        return f"no bucket named {url.split('/')[2]!r}; "
    if re.search(r"status code: 40[13]", text):
        return "the store rejects these credentials; "
    return ""


def _brief(error: BaseException) -> str:
    """Return the first line of an obstore error. The other lines are debug output."""
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line), type(error).__name__)
    return masked(first.partition(": <?xml")[0])[:300]


def without_secrets(error: Exception) -> Exception:
    """Return a store's error for a traceback, with secrets masked. URLs of requests contain signatures and tokens.

    An error with a secret is created again with a masked message, of the same type where possible.
    """
    text = str(error)
    if masked(text) == text:
        return error
    try:
        return type(error)(masked(text))
    except TypeError:  # the type cannot be created from a message
        return StorageError(f"{type(error).__name__}: {masked(text)}")
