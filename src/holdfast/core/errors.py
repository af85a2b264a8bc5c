"""The errors of Holdfast: one root with a few subclasses, each also a builtin; records that ranks exchange."""

from __future__ import annotations


class HoldfastError(Exception):
    """Base class of every error that Holdfast raises on purpose."""


class Damaged(HoldfastError, ValueError):
    """The stored bytes differ from what was committed: a bad digest, header, manifest or size."""


class NotFound(HoldfastError, FileNotFoundError):
    """A checkpoint, file or key that was asked for does not exist."""


class Mismatch(HoldfastError, ValueError):
    """The checkpoint does not fit the live state: keys, shapes, dtypes or meshes differ."""


class LayoutError(HoldfastError, ValueError):
    """The ranks do not hold one consistent state: a hole, or different shapes or replicas."""


class Unsupported(HoldfastError, TypeError):
    """A value that the format cannot represent. It is refused instead of guessed."""


class InvalidArgument(HoldfastError, ValueError):
    """An option, a step or a pattern that makes no sense."""


class StorageError(HoldfastError, OSError):
    """The storage failed: a full disk, an input/output error, a missing permission."""


class NoArena(StorageError):
    """No shared memory is available for a capture."""


class Untrusted(StorageError):
    """Another user may have placed this checkpoint under the root; nothing of it is used."""


class Skipped(HoldfastError, RuntimeError):
    """The step was not saved because the previous save was still being written."""


class TimedOut(HoldfastError, TimeoutError):
    """A wait exceeded its deadline."""


class PeerFailed(HoldfastError, RuntimeError):
    """Another rank failed with an error that is not one of Holdfast's."""


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
    """Return the class and message of an error, to send to other ranks."""
    for leaf in _LEAVES:
        if isinstance(error, leaf):
            return [leaf.__name__, str(error)]
    if isinstance(error, HoldfastError):
        return [PeerFailed.__name__, str(error)]
    return [PeerFailed.__name__, f"{type(error).__name__}: {error}"]


def error_from_record(record: list[str]) -> HoldfastError:
    """Rebuild an error that another rank sent."""
    name, message = record
    return _BY_NAME.get(name, PeerFailed)(message)
