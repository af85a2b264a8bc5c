"""Seeds of a DataLoader's persistent workers: drawn from the global stream once in a run, not after each resume.

A DataLoader draws a seed for its workers from torch's global stream whenever it starts them. Persistent workers are
started in the first epoch. A resumed run starts them again, in an epoch where the run that never stopped draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def has_workers(loader: Any) -> bool:
    """Return True if a loader, or the one that accelerate wraps, has persistent workers that run."""
    return getattr(_base(loader), "_iterator", None) is not None


def seed_apart(loader: Any) -> None:
    """Let a loader without running workers draw their seed from a stream of its own."""
    base = _base(loader)
    if getattr(base, "persistent_workers", False) and base._iterator is None and base.generator is None:
        base.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)


@contextmanager
def seeded_apart(loader: Any, *, when: bool = True) -> Iterator[None]:
    """Call `seed_apart` for the iterator that is made within; `when` is False for the first epoch of a run."""
    base = _base(loader)
    before = base.generator
    if when:
        seed_apart(base)
    try:
        yield
    finally:
        base.generator = before


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)
