"""Code that torch.compile made: forgotten when the rules change, and cached on disk apart by rules and rank.

A graph holds the decisions of its trace: torch's if it was made before `enable()`, those of one rank if a rule
needs its rank. Torch's caches on disk know neither, so that a second start would run the graph of another rank.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch.compiler.config
import torch.distributed as dist

from holdfast.spmd.base.torch_modes import traces_for_all_ranks

_PACKAGE = Path(__file__).parents[1]
# The setting that goes into the keys. Its forced value, a private name, is the only one that every thread sees; a torch
# without it gets the tag in the thread that calls `enable()`.
_CONFIG: Any = torch.compiler.config
_SETTING: Any = getattr(_CONFIG, "_config", {}).get("cache_key_tag")
_IS_FORCED = all(
    hasattr(_SETTING, name) for name in ("env_value_force", "env_value_default", "user_override", "default")
)
_FORCED_BEFORE: list[Any] = []  # empty while the rules are off


class _CacheTag(str):
    """The tag in the keys of torch's caches: the user's, the rules, and the rank, all as they are at the moment."""

    __slots__ = ()

    def _now(self) -> str:
        if not _FORCED_BEFORE:  # config.patch has put it back after disable()
            return _user_tag()
        text = f"{_user_tag()} {str.__str__(self)}".strip()
        if not dist.is_available() or not dist.is_initialized() or traces_for_all_ranks():
            return text
        return f"{text} rank {dist.get_rank()} of {dist.get_world_size()}"

    def __str__(self) -> str:
        return self._now()

    def __format__(self, spec: str) -> str:
        return format(self._now(), spec)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (self._now(),)


def _user_tag() -> str:
    """Return the tag that this thread would have without the rules."""
    if not _IS_FORCED:
        return str(_FORCED_BEFORE[0]) if _FORCED_BEFORE else ""
    override = _SETTING.user_override
    tags = [override.get() if isinstance(override, ContextVar) else override, _SETTING.env_value_default]
    return next((tag for tag in tags if type(tag) is str), str(_SETTING.default))


def use_own_code(choice: str) -> None:
    """Forget the code that was compiled without the rules; `choice` names the rules that are on."""
    _FORCED_BEFORE.append(_SETTING.env_value_force if _IS_FORCED else _CONFIG.cache_key_tag)
    _set(_CacheTag(f"holdfast.spmd {_source_digest()} {choice}"))
    _forget()


def use_torch_code() -> None:
    """Forget the code that was compiled with the rules, and take the rules out of the tag."""
    if _FORCED_BEFORE:
        _set(_FORCED_BEFORE.pop())
        if isinstance(_CONFIG.cache_key_tag, _CacheTag):  # config.patch has put it back
            _CONFIG.cache_key_tag = _user_tag()
        _forget()


def _set(tag: Any) -> None:
    if _IS_FORCED:
        _SETTING.env_value_force = tag
    else:
        _CONFIG.cache_key_tag = tag


def _forget() -> None:
    """Clear what was compiled in this process, if anything may have been."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@functools.cache
def _source_digest() -> str:
    """Return a digest of the rules' source: another version of them may decide otherwise."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
