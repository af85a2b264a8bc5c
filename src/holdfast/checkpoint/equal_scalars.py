"""Scalars of several sources that a mapping makes one: step counts of weights that are joined."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Mismatch
from holdfast.mapping.apply import EqualScalars


def require_same(checkpoint: Checkpoint, scalars: Sequence[EqualScalars]) -> None:
    """Read them all at once; raises Mismatch where they differ.

    Without digests: they are a few bytes of many blocks, and what is used of them is verified later.
    """
    recipes = [recipe for same in scalars for recipe in same.recipes]
    found = iter(checkpoint.read_recipes(recipes, checkpoint.contents.files, verify=False))
    for same in scalars:
        values = [next(found) for _ in same.recipes]
        if any(value.tobytes() != values[0].tobytes() for value in values):
            shown = ", ".join(str(value.item()) for value in values[:4])
            raise Mismatch(f"{same.name} is made of several, which hold different values: {shown}")
