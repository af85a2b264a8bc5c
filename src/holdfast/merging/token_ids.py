"""The tokens of an input model with their ids, from its tokenizer.json, and the conflicts between two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.format import strictjson
from holdfast.merging.model_input import InputModel

TOKENIZER = "tokenizer.json"
_MOST_IDS = 1 << 24  # more rows than any embedding has
_SHOWN = 3
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Tokens by kind: regular ones of the tokenizer's model, and added ones with their definitions."""

    regular: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]]

    @property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens."""
        return {**self.regular, **{token: int(fields["id"]) for token, fields in self.added.items()}}


def read_token_ids(model: InputModel) -> TokenIds | None:
    """Return the tokens of a model, or None if it has no tokenizer.json with a vocabulary."""
    data = model.side_file(TOKENIZER)
    fields = None if data is None else strictjson.loads(data, f"{model.path}/{TOKENIZER}")
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), dict):
        return None
    vocabulary = fields["model"].get("vocab")
    if isinstance(vocabulary, list):  # of Unigram: pairs of token and score
        pairs = [(number, entry) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
        vocabulary = {str(entry[0]): number for number, entry in pairs}
    if not isinstance(vocabulary, dict):
        return None
    listed = fields.get("added_tokens")
    added = {
        entry["content"]: entry
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }
    regular = {str(token): number for token, number in vocabulary.items() if token not in added}
    for token, number in [*regular.items(), *((token, entry.get("id")) for token, entry in added.items())]:
        if type(number) is not int or not 0 <= number < _MOST_IDS:
            raise Damaged(
                f"{model.path}/{TOKENIZER}: the id of {token[:80]!r} is {str(number)[:80]}; expected a number below "
                f"{_MOST_IDS}"
            )
    return TokenIds(regular, added)


def regular_difference(model: InputModel, own: TokenIds, donor: InputModel, known: TokenIds) -> str | None:
    """Return how the regular tokens of two tokenizers differ; None if each has all of the other's."""
    here = own.regular.keys() | own.added.keys()
    there = known.regular.keys() | known.added.keys()
    other = [token for token in own.regular if token not in there] + [t for t in known.regular if t not in here]
    if not other:
        return None
    shown = ", ".join(map(repr, other[:_SHOWN]))
    return (
        f"{model.path} has another tokenizer than {donor.path}: {len(other)} regular tokens are not in both, for "
        f"example {shown}; only added tokens can be joined"
    )


def conflict(model: InputModel, donor: InputModel) -> str | None:
    """Return why rows of the same number stand for different tokens in two models, and what to do; None if not."""
    ours, theirs = read_token_ids(model), read_token_ids(donor)
    found = (
        _different_file(model, donor) if ours is None or theirs is None else _other_number(model, ours, donor, theirs)
    )
    if found is None:
        return None
    if ours is not None and theirs is not None:
        difference = regular_difference(model, ours, donor, theirs)
        if difference is not None:
            return f"{difference}; tokens='rows' (--tokens rows) merges row by row in spite of it"
    return f"{found}; join them with tokens='union' (--tokens union), or merge row by row with tokens='rows'"


def _other_number(model: InputModel, ours: TokenIds, donor: InputModel, theirs: TokenIds) -> str | None:
    ids, known = ours.ids, theirs.ids
    for token, number in ids.items():
        if known.get(token, number) != number:
            return f"the token {token!r} is number {number} in {model.path}, and {known[token]} in {donor.path}"
    token_of = {number: token for token, number in known.items()}
    for token, number in ids.items():
        if token_of.get(number, token) != token:
            return f"number {number} is the token {token!r} in {model.path}, and {token_of[number]!r} in {donor.path}"
    return None


def _different_file(model: InputModel, donor: InputModel) -> str | None:
    for name in _OTHER_FILES:
        own, other = model.side_file(name), donor.side_file(name)
        if own is not None and other is not None and own != other:
            return f"{name} of {model.path} is not that of {donor.path}"
    return None
