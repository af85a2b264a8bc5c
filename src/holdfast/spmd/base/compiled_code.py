"""Code that torch.compile made: forgotten when the rules change, and cached on disk apart by rules and rank.

A graph holds the decisions of its trace: torch's if it was made before `enable()`, those of one rank if a rule
needs its rank. Torch's caches on disk know neither, so that a second start would run the graph of another rank.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch.compiler.config
import torch.distributed as dist

from holdfast.spmd.base.torch_modes import traces_for_all_ranks

_PACKAGE = Path(__file__).parents[1]
_FOUND: list[str] = []  # torch's tag before `enable()`; empty while the rules are off


class _CacheTag(str):
    """The tag in the keys of torch's caches; the rank is that of the moment, since enable() may come before it."""

    __slots__ = ()

    def _now(self) -> str:
        text = str.__str__(self)
        if not dist.is_available() or not dist.is_initialized() or traces_for_all_ranks():
            return text
        return f"{text} rank {dist.get_rank()} of {dist.get_world_size()}"

    def __str__(self) -> str:
        return self._now()

    def __format__(self, spec: str) -> str:
        return format(self._now(), spec)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (self._now(),)


def use_own_code(choice: str) -> None:
    """Forget the code that was compiled without the rules; `choice` names the rules that are on."""
    config: Any = torch.compiler.config
    _FOUND.append(config.cache_key_tag)
    config.cache_key_tag = _CacheTag(f"{_FOUND[0]} holdfast.spmd {_source_digest()} {choice}".strip())
    _forget()


def use_torch_code() -> None:
    """Forget the code that was compiled with the rules, and restore torch's tag."""
    if _FOUND:
        config: Any = torch.compiler.config
        config.cache_key_tag = _FOUND.pop()
        _forget()


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
