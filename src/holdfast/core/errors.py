"""The errors of Holdfast: one root, few leaves, each also the builtin a caller would expect."""

from __future__ import annotations


class HoldfastError(Exception):
    """Root of every error that Holdfast raises on purpose."""


class Damaged(HoldfastError, ValueError):
    """Stored bytes are not what was committed: a bad digest, header, manifest or size."""


class NotFound(HoldfastError, FileNotFoundError):
    """There is no checkpoint, file or key where one was asked for."""


class Mismatch(HoldfastError, ValueError):
    """The checkpoint and the live state do not fit: keys, shapes, dtypes or meshes differ."""


class LayoutError(HoldfastError, ValueError):
    """The ranks do not hold one consistent state: a hole, a differing shape or replica."""


class Unsupported(HoldfastError, TypeError):
    """A value that the format cannot represent, refused instead of being guessed at."""


class InvalidArgument(HoldfastError, ValueError):
    """An option, a step or a pattern that makes no sense."""


class StorageError(HoldfastError, OSError):
    """The storage failed: a full disk, an input/output error, a missing permission."""


class NoArena(StorageError):
    """There is no shared memory to capture into."""


class Untrusted(StorageError):
    """A checkpoint that another user may have put under the root; nothing of it is used."""


class Skipped(HoldfastError, RuntimeError):
    """The step was not saved: the save before it was still being written."""


class TimedOut(HoldfastError, TimeoutError):
    """What was waited for did not come in the time given."""


class PeerFailed(HoldfastError, RuntimeError):
    """Another rank failed in a way that has no Holdfast error of its own."""


_LEAVES = (
    Damaged,
    NotFound,
    Mismatch,
    LayoutError,
    Unsupported,
    InvalidArgument,
    NoArena,
    Untrusted,
    StorageError,
    Skipped,
    TimedOut,
    PeerFailed,
)
_BY_NAME: dict[str, type[HoldfastError]] = {leaf.__name__: leaf for leaf in _LEAVES}


def error_record(error: BaseException) -> list[str]:
    """What one rank tells the others about its error: the class and the message."""
    for leaf in _LEAVES:
        if isinstance(error, leaf):
            return [leaf.__name__, str(error)]
    if isinstance(error, HoldfastError):
        return [PeerFailed.__name__, str(error)]
    return [PeerFailed.__name__, f"{type(error).__name__}: {error}"]


def error_from_record(record: list[str]) -> HoldfastError:
    """The same error, made again on the rank that was told of it."""
    name, message = record
    return _BY_NAME.get(name, PeerFailed)(message)
