"""Check that scalars merged by a mapping, such as step counts of joined weights, are equal in the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Mismatch
from holdfast.mapping.apply import EqualScalars


def require_same(checkpoint: Checkpoint, scalars: Sequence[EqualScalars]) -> None:
    """Read all scalars at once; raises Mismatch if those merged into one differ.

    Digests are not checked: the scalars are a few bytes of many blocks, and used values are verified later.
    """
    recipes = [recipe for same in scalars for recipe in same.recipes]
    found = iter(checkpoint.read_recipes(recipes, checkpoint.contents.files, verify=False))
    for same in scalars:
        values = [next(found) for _ in same.recipes]
        if any(value.tobytes() != values[0].tobytes() for value in values):
            shown = ", ".join(str(value.item()) for value in values[:4])
            raise Mismatch(f"{same.name} is merged from several tensors with different values: {shown}")
