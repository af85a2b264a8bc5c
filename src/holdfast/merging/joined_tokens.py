"""Models with other tokens joined by token: the donor keeps its ids, tokens that it lacks are appended or left out.

A model without a token gets its row from the base if that has the token, else the mean of the models that have it:
a method that adds changes to a base then adds none for it. Rows without a token are the donor's in every model.
A token that is only in a tokenizer, past the rows of its model, is nowhere in use and not appended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import Mismatch
from holdfast.merging.model_input import InputModel, TensorSource, find_tied
from holdfast.merging.row_source import NOWHERE, GatheredRows, RowOrigins
from holdfast.merging.token_ids import TokenIds, regular_difference

_VOCABULARY = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|lm_head|embed_out|output)\.(?:weight|bias)"
)
_STEP = 64  # rows are padded to multiples of this, as most models are


@dataclass(frozen=True, slots=True)
class JoinedTokens:
    """The joined vocabulary: its rows, the appended tokens with their definitions, and what each model got."""

    rows: int
    appended: Mapping[str, Mapping[str, Any]]
    table: Mapping[str, Any]

    @property
    def note(self) -> str:
        """One line about what was done."""
        filled, left_out = (
            ", ".join(f"{len(tokens)} in {name}" for name, tokens in self.table[part].items() if tokens)
            for part in ("filled", "left_out")
        )
        without = f", left out: {left_out}" if left_out else ""
        return f"tokens joined: {len(self.appended)} appended, filled: {filled or 'none'}{without}; {self.rows} rows"


def join_tokens(
    models: Sequence[InputModel], tokens: Sequence[TokenIds], donor: int, base: int | None, *, append: bool
) -> JoinedTokens:
    """Replace the embeddings of every model by ones with a row for every token of all models, or of the donor.

    Raises Mismatch for a tokenizer with other regular tokens than the donor's.
    """
    for model, own in zip(models, tokens, strict=True):
        difference = regular_difference(model, own, models[donor], tokens[donor])
        if difference is not None:
            raise Mismatch(difference)
    keys = [key for key in models[donor].tensors if _VOCABULARY.fullmatch(key)]
    sizes = [_row_count(model, keys) for model in models]
    known = [own.ids for own in tokens]
    used = {token for own, size in zip(known, sizes, strict=True) for token, row in own.items() if row < size}
    ids, appended = _joined(tokens, used if append else set(), donor)
    before = sizes[donor]
    rows = max(before, max((row for token, row in ids.items() if token in used), default=-1) + 1)
    if rows > before and before % _STEP == 0:
        rows = -(-rows // _STEP) * _STEP
    ids = {token: row for token, row in ids.items() if row < rows}
    replaced: list[dict[str, TensorSource]] = [{} for _ in models]
    for key in keys:
        sources = tuple(find_tied(model, key) for model in models)
        for number, source in enumerate(sources):
            if source is not None:
                origins = _origins(ids, known, sources, number, donor, base, rows)
                shape = (rows, *source.shape[1:])
                replaced[number][key] = GatheredRows(shape, source.dtype, sources, origins)
    for model, tensors in zip(models, replaced, strict=True):
        model.tensors.update({key: source for key, source in tensors.items() if key in model.tensors})
    filled = {m.name: [t for t in ids if t not in own] for m, own in zip(models, known, strict=True)}
    left_out = {
        m.name: [t for t in own.added if t not in known[donor] and t not in appended]
        for m, own in zip(models, tokens, strict=True)
    }
    table = {"rows": rows, "rows_before": before, "appended": {t: int(f["id"]) for t, f in appended.items()}}
    return JoinedTokens(rows, appended, {**table, "filled": filled, "left_out": left_out})


def _row_count(model: InputModel, keys: Sequence[str]) -> int:
    """Return the rows of a model's embeddings; 0 if it has none."""
    sources = (find_tied(model, key) for key in keys)
    return max((source.shape[0] for source in sources if source is not None and 0 not in source.shape), default=0)


def _joined(
    tokens: Sequence[TokenIds], wanted: Collection[str], donor: int
) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Return the ids of the donor's tokens and the wanted ones, and the definitions of those that it lacks."""
    ids = tokens[donor].ids
    appended: dict[str, dict[str, Any]] = {}
    following = max(ids.values(), default=-1) + 1
    for own in tokens:
        for token, fields in sorted(own.added.items(), key=lambda item: int(item[1]["id"])):
            if token not in ids and token in wanted:
                ids[token] = following
                appended[token] = {**fields, "id": following}
                following += 1
    return ids, appended


def _origins(
    ids: Mapping[str, int],
    known: Sequence[Mapping[str, int]],
    sources: Sequence[TensorSource | None],
    model: int,
    donor: int,
    base: int | None,
    rows: int,
) -> RowOrigins:
    """Return where the rows of one model come from."""
    models, places = np.full(rows, NOWHERE, np.int64), np.zeros(rows, np.int64)
    means: dict[int, tuple[tuple[int, int], ...]] = {}
    of_donor = sources[donor]
    if of_donor is not None:
        models[: of_donor.shape[0]], places[: of_donor.shape[0]] = donor, np.arange(of_donor.shape[0])
    for token, row in ids.items():
        having = [number for number in range(len(known)) if _has_row(known[number], sources[number], token)]
        preferred = [number for number in (model, base) if number in having]
        chosen = preferred[:1] or having
        found = tuple((number, known[number][token]) for number in chosen if number is not None)
        if len(found) == 1:
            models[row], places[row] = found[0]
        elif found:
            means[row] = found
    return RowOrigins(models, places, means)


def _has_row(known: Mapping[str, int], source: TensorSource | None, token: str) -> bool:
    return source is not None and token in known and known[token] < source.shape[0] and math.prod(source.shape) > 0
