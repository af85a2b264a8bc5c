"""Options of saves, loads and background saves: frozen, keyword-only, validated here and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import model_dtype_named
from holdfast.format.manifest import BASE_MODES
from holdfast.keep import Policy
from holdfast.mapping.per_module import check_mapping
from holdfast.plan.contents import KeySelection
from holdfast.program.model_program import Program

DEADLINE_S = 1800.0
SILENCE_S = 60.0
GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a state is saved. `max_shard_size` and `block_bytes` determine the bytes of the files.

    `only` and `ignore` are patterns of keys, as in `LoadOptions`.
    """

    max_shard_size: int | str = limits.MAX_SHARD_BYTES
    block_bytes: int = limits.BLOCK_BYTES
    model_dtype: str | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    replicas: str = "error"
    mesh: Any = None
    mapping: Any = None  # a program, or one program per module name
    only: Sequence[str] = ()
    ignore: Sequence[str] = ()
    base: str | None = None  # of models with adapters: "reference", "full", "none", or as fits
    hub_keys: bool = True  # of transformers models without a mapping, store the names that save_pretrained writes
    program: Program | None = None  # of the module "model", published with every step
    whole_files: bool = False  # required by the storage: see Storage.whole_files

    @property
    def max_shard_bytes(self) -> int:
        return limits.parse_bytes(self.max_shard_size)

    def __post_init__(self) -> None:
        limits.parse_bytes(self.max_shard_size)
        for name in ("only", "ignore"):
            object.__setattr__(self, name, check_patterns(getattr(self, name)))
        _check_flag("hub_keys", self.hub_keys)
        if self.mapping is not None:
            check_mapping(self.mapping)
        if self.program is not None and not isinstance(self.program, Program):
            kind = type(self.program).__name__
            raise InvalidArgument(f"program={kind}: give what holdfast.export_program(model, example_inputs) returns")
        if (dtype := model_dtype_named(self.model_dtype)) is not None:
            object.__setattr__(self, "model_dtype", dtype.name)
        pairs = self.ties.items() if isinstance(self.ties, Mapping) else [(self.ties,)]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise InvalidArgument(f"ties={self.ties!r} is not a mapping of keys to keys")
        if self.base not in (None, *BASE_MODES):
            raise InvalidArgument(f"base={self.base!r}: choose 'reference', 'full' or 'none'")
        if self.replicas not in ("error", "first"):
            raise InvalidArgument(f"replicas={self.replicas!r}: choose 'error' or 'first'")
        if self.block_bytes % limits.PAGE_BYTES or self.block_bytes <= 0:
            raise InvalidArgument(f"block_bytes={self.block_bytes} is not a multiple of {limits.PAGE_BYTES}")

    def for_loads(self, only: Sequence[str], ignore: Sequence[str]) -> dict[str, Any]:
        """Return the LoadOptions that restore what these options save; `only` replaces, and `ignore` adds to it."""
        return {
            "only": only or self.only,
            "ignore": (*self.ignore, *check_patterns(ignore)),
            "of_run": (*self.only, *self.ignore),
            "ties": self.ties,
            "mesh": self.mesh,
            "mapping": self.mapping,
            "reverse": self.mapping is not None,
            "hub_keys": self.hub_keys,
        }

    def require_reversible(self) -> None:
        """Raise unless a state saved with these options can be restored through the reverse of the mapping."""
        if self.mapping is not None:
            check_mapping(self.mapping, reversible=True)


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of one host, while all hosts read or pass bytes on."""

    storage: float
    network: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which keys are loaded, and how strictly. Patterns are shell-like and match a key or "group/key"."""

    strict: bool = True
    verify: bool = True
    cast: bool = False
    only: Sequence[str] = ()
    ignore: Sequence[str] = ()
    of_run: Sequence[str] = ()  # the patterns that every save of the run had: they need not fit anything here
    ties: Mapping[str, str] = field(default_factory=dict)
    mesh: Any = None
    mapping: Any = None  # a program, or one program per module name
    device: Any = None  # for tensors on the meta device
    reverse: bool = False  # the checkpoint was saved through this mapping
    hub_keys: bool = True  # read files of other tools by the conversion rules of a transformers model
    memory_bytes: int | str = limits.LOAD_MEMORY_BYTES
    read_once: bool | str | Mapping[str, int | str] = "auto"  # or the bandwidths to choose by

    def __post_init__(self) -> None:
        given = self.read_once
        _check_flag("hub_keys", self.hub_keys)
        if isinstance(given, Mapping):
            if set(given) != {"storage", "network"}:
                raise InvalidArgument(f"read_once={given!r}: give the bytes per second of 'storage' and of 'network'")
            _ = self.bandwidths
        elif not isinstance(given, bool) and given != "auto":
            raise InvalidArgument(f"read_once={given!r}: choose 'auto', True, False, or give the bandwidths")
        if self.memory_limit_bytes < limits.LEAST_LOAD_MEMORY_BYTES:
            least = limits.LEAST_LOAD_MEMORY_BYTES // 1000**2
            raise InvalidArgument(f"memory_bytes={self.memory_bytes!r}: the buffers of a load need at least {least} MB")

    @property
    def memory_limit_bytes(self) -> int:
        """The most memory that a rank's load uses beside its tensors."""
        return limits.parse_bytes(self.memory_bytes)

    @property
    def bandwidths(self) -> Bandwidths | None:
        """The given bandwidths, if any."""
        if not isinstance(self.read_once, Mapping):
            return None
        try:
            return Bandwidths(*(float(limits.parse_bytes(self.read_once[name])) for name in ("storage", "network")))
        except InvalidArgument as error:
            raise InvalidArgument(f"read_once={self.read_once!r}: bytes per second, {error}") from None

    def key_selection(self) -> KeySelection:
        """Return the selection of keys. Ranks call this collectively: a wrong pattern fails every rank."""
        return KeySelection(check_patterns(self.only), check_patterns(self.ignore))


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r}: choose True or False")


def check_progress(progress: object) -> None:
    """Raise unless progress can be reported to it."""
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress={progress!r} cannot be called with a number of bytes")


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of keys as a tuple; raises InvalidArgument if they are not a list of strings."""
    if isinstance(patterns, str):  # a string is a sequence of letters, too
        raise InvalidArgument(f"patterns are a list of strings: write [{patterns!r}]")
    if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidArgument(f"patterns are a list of strings, not {patterns!r}")
    return tuple(patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundOptions:
    """How a run saves in the background. No wait is longer than `deadline_s`."""

    deadline_s: float = DEADLINE_S
    silence_s: float = SILENCE_S
    grace_s: float = GRACE_S
    on_busy: str = "wait"
    arena_bytes: int | str | None = None
    writer_threads: int | None = None
    keep: Policy | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and not isinstance(self.keep, Policy):
            raise InvalidArgument(f"keep={self.keep!r} is not a policy: write for example holdfast.keep.last(3)")
        if self.on_busy not in ("wait", "skip"):
            raise InvalidArgument(f"on_busy={self.on_busy!r}: choose 'wait' or 'skip'")
        for name in ("grace_s", "deadline_s", "silence_s"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise InvalidArgument(f"{name}={seconds!r} is not a positive number of seconds")
        threads = self.writer_threads
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise InvalidArgument(f"writer_threads={threads!r} is not an integer of at least 1")
        if self.arena_bytes is not None:
            limits.parse_bytes(self.arena_bytes)

    @property
    def arena_limit_bytes(self) -> int | None:
        """The largest arena of a rank; None if there is no limit."""
        return None if self.arena_bytes is None else limits.parse_bytes(self.arena_bytes)
