"""The ids of a folder's tokenizer, read from its files without a tokenizer library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.format import strictjson

TOKENIZER = "tokenizer.json"


def known_ids(files: Mapping[str, bytes], folder: str = "") -> dict[int, str] | None:
    """Return the tokens of a tokenizer by id, None if no file that can be read has them.

    Raises Damaged for files that are not what their names say.
    """
    whole = _fields(files, f"{folder}{TOKENIZER}")
    if whole is not None:
        model = whole.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        pairs = [*_pairs(vocabulary), *_added(whole.get("added_tokens"))]
    else:
        parts = [_fields(files, f"{folder}{name}") for name in ("vocab.json", "added_tokens.json")]
        pairs = [pair for part in parts if part is not None for pair in _pairs(part)]
    return {number: token for token, number in pairs} or None


def _fields(files: Mapping[str, bytes], name: str) -> dict[str, Any] | None:
    if name not in files:
        return None
    fields = strictjson.loads(files[name], name)
    if not isinstance(fields, dict):
        raise Damaged(f"{name}: expected a JSON object")
    return fields


def _pairs(vocabulary: Any) -> Iterator[tuple[str, int]]:
    """Yield tokens with their ids: from a dict, or from a list of pieces with their scores."""
    if isinstance(vocabulary, dict):
        yield from ((str(token), number) for token, number in vocabulary.items() if type(number) is int)
    elif isinstance(vocabulary, list):
        for number, piece in enumerate(vocabulary):
            yield (str(piece[0]) if isinstance(piece, list) and piece else str(piece)), number


def _added(tokens: Any) -> Iterator[tuple[str, int]]:
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            yield str(token.get("content")), token["id"]
