"""Read many tensors of one element at once as floats, file by file, without verification."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged
from holdfast.format.dtypes import numpy_dtype
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe, cast_raw


def read_scalars(checkpoint: Checkpoint, recipes: Mapping[str, Recipe[Place]]) -> dict[str, float]:
    """Return the values of tensors of one element. Raises Damaged, with the key, for any other size.

    Digests are not verified, because that would read the whole block around each scalar.
    """
    by_file: dict[str, list[tuple[Place, str]]] = {}
    for key, recipe in recipes.items():
        sources = recipe.sources()
        if len(sources) != 1 or sources[0].spec.bytes != sources[0].spec.dtype.bytes:
            raise Damaged(f"{checkpoint.path}: {key!r} has the shape {list(recipe.shape)}, expected one number")
        by_file.setdefault(sources[0].file, []).append((sources[0], key))
    out: dict[str, float] = {}
    for file, wanted in by_file.items():
        reader = checkpoint.open_file(file)
        try:
            for place, key in sorted(wanted, key=lambda item: item[0].begin):
                data = bytearray(place.spec.bytes)
                reader.read_into(place.begin, [memoryview(data)])
                raw = np.frombuffer(data, dtype=f"u{place.spec.dtype.bytes}")
                raw = cast_raw(raw, place.spec.dtype, recipes[key].terms[0].casts)
                out[key] = float(raw.view(numpy_dtype(recipes[key].dtype.name))[0])
        finally:
            reader.close()
    return out
