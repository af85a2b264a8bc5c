"""The tokens of a folder's tokenizer with their ids and roles, read from its files without a tokenizer library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.format import strictjson

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token as one file has it."""

    text: str
    number: int
    file: str
    is_special: bool = False


def token_entries(files: Mapping[str, bytes], folder: str = "") -> list[TokenEntry]:
    """Return the tokens of all files that have some; raises Damaged for files that are not what their names say."""
    out = []
    whole = json_fields(files, f"{folder}{TOKENIZER}")
    model = whole.get("model")
    out += [
        TokenEntry(text, number, TOKENIZER)
        for text, number in _pairs(model.get("vocab") if isinstance(model, dict) else None)
    ]
    for token in _dicts(whole.get("added_tokens")):
        if type(token.get("id")) is int:
            out.append(TokenEntry(str(token.get("content")), token["id"], TOKENIZER, token.get("special") is True))
    for name in ("vocab.json", "added_tokens.json"):
        pairs = _pairs(json_fields(files, f"{folder}{name}"))
        out += [TokenEntry(text, number, name) for text, number in pairs]
    decoder = json_fields(files, f"{folder}{TOKENIZER_CONFIG}").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and number.isdecimal():
            special = token.get("special") is True
            out.append(TokenEntry(str(token.get("content")), int(number), TOKENIZER_CONFIG, special))
    return out


def known_ids(files: Mapping[str, bytes], folder: str = "") -> dict[int, str] | None:
    """Return the tokens of a tokenizer by id, None if no file that can be read has them."""
    entries = token_entries(files, folder)
    has_vocabulary = any(entry.file in (TOKENIZER, "vocab.json") for entry in entries)
    return {entry.number: entry.text for entry in entries} if has_vocabulary else None


def role_tokens(files: Mapping[str, bytes], folder: str = "") -> dict[str, str]:
    """Return the special tokens that tokenizer_config.json names, by role."""
    fields = json_fields(files, f"{folder}{TOKENIZER_CONFIG}")
    out = {}
    for role in ROLES:
        token = fields.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            out[role] = text
    return out


def json_fields(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the fields of a JSON file, empty without one; raises Damaged unless they are an object."""
    if name not in files:
        return {}
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


def _dicts(values: Any) -> Iterator[dict[str, Any]]:
    yield from (value for value in (values if isinstance(values, list) else ()) if isinstance(value, dict))
