"""`holdfast.tokens.add`: new tokens in a tokenizer, and rows for them in a live model, sharded or not."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.tokens.initial_rows import InitialRows
from holdfast.tokens.model_embeddings import Vocabulary, find_vocabulary
from holdfast.tokens.resize_optimizer import check_states, replace_parameter
from holdfast.tokens.resize_tensor import overwrite, replace_tensor, reshard, whole_of, with_rows
from holdfast.tokens.row_options import check_init, rows_for
from holdfast.tokens.token_configs import ROLES, set_ids, set_rows


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The ids of the tokens, the rows before and now, and the keys of the tensors that changed."""

    ids: Mapping[str, int]
    rows_before: int
    rows: int
    keys: tuple[str, ...]


def add(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[str] = (),
    *,
    special: bool = False,
    roles: Mapping[str, str] | None = None,
    init: str = "mean",
    like: Mapping[str, str] | None = None,
    pad_to: int | None = 64,
    optimizer: Any = None,
) -> AddedTokens:
    """Add tokens to a tokenizer of transformers, and to a live model the rows that they need.

    The rows of all known tokens keep their bits, and the vocabulary never shrinks. Tokens first take the rows that
    pad the vocabulary; if these are too few, it grows to a multiple of `pad_to`. New rows, padding included, begin as
    the mean of the rows of known tokens, or zero (`init`), or by token as the mean of the pieces of a text that
    `like` gives. Tied weights stay tied. `special` tokens are never split and can be skipped in decoded text; `roles`
    makes tokens the "bos_token", "eos_token" or "pad_token". config and generation_config follow.

    A model may be sharded with FSDP2, tensor parallelism, or both: every rank calls this with the same tokens.
    Parameters that grow become new objects: `optimizer` gets them, with zeros for the new rows of its states. An
    optimizer that is not given has to be made after this call; so have EMA and others that hold parameters.
    """
    roles = dict(roles or {})
    _check(tokens, roles, tokenizer)
    check_init(init)
    reshard(model)
    vocabulary = find_vocabulary(model)
    rows_for(1, vocabulary.rows, pad_to)  # checks it before the tokenizer is changed
    likenesses = _known_pieces(tokenizer, like or {}, [*tokens, *roles.values()])
    for held in vocabulary.tensors if optimizer is not None else ():
        check_states(optimizer, held.tensor, held.key)
    known = tokenizer.get_vocab()
    for each in (copy.deepcopy(tokenizer), tokenizer):  # a refusal leaves the tokenizer as it was
        _extend(each, tokens, roles, special=special)
        ids = _ids_of(each, (*tokens, *roles.values()), known)
    new = {token: row for token, row in ids.items() if token not in known}
    rows = rows_for(_end(tokenizer.get_vocab()), vocabulary.rows, pad_to)
    like_rows = {new[token]: pieces for token, pieces in likenesses.items() if token in new}
    fresh = [*(row for row in new.values() if row < vocabulary.rows), *range(vocabulary.rows, rows)]
    if fresh:
        initial = InitialRows(init, min(_end(known), vocabulary.rows), like_rows)
        _resize(vocabulary, rows, initial, fresh, optimizer)
    set_ids(vocabulary.model, {role: ids[token] for role, token in roles.items()})
    return AddedTokens(ids, vocabulary.rows, rows, tuple(held.key for held in vocabulary.tensors) if fresh else ())


def _end(vocabulary: Mapping[str, int]) -> int:
    """Return the number after the highest id."""
    return max(vocabulary.values(), default=-1) + 1


def _check(tokens: Sequence[str], roles: Mapping[str, str], tokenizer: Any) -> None:
    if isinstance(tokens, str):  # a string is a sequence of letters, too
        raise InvalidArgument(f"tokens are a list of strings: write [{tokens!r}]")
    wrong = [token for token in (*tokens, *roles.values()) if not isinstance(token, str) or not token]
    if wrong:
        raise InvalidArgument(f"{wrong[0]!r} is not a token: give non-empty strings")
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise InvalidArgument(f"roles={unknown[0]!r}: choose {', '.join(ROLES)}")
    if not hasattr(tokenizer, "add_tokens") or not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise InvalidArgument(f"{type(tokenizer).__name__} is not a tokenizer of transformers")


def _known_pieces(tokenizer: Any, like: Mapping[str, str], tokens: Sequence[str]) -> dict[str, list[int]]:
    """Return by token the ids of the pieces of the text that it is like, as the tokenizer splits it before."""
    pieces = {}
    for token, text in like.items():
        if token not in tokens:
            raise InvalidArgument(f"like: {token!r} is not one of the tokens to add")
        pieces[token] = list(tokenizer.encode(text, add_special_tokens=False))
        if not pieces[token]:
            raise InvalidArgument(f"like: the text {text!r} of {token!r} has no tokens")
    return pieces


def _extend(tokenizer: Any, tokens: Sequence[str], roles: Mapping[str, str], *, special: bool) -> None:
    if tokens:
        tokenizer.add_tokens(list(tokens), special_tokens=special)
    if roles:
        tokenizer.add_special_tokens(dict(roles))


def _ids_of(tokenizer: Any, tokens: Sequence[str], known: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of added tokens. Raises InvalidArgument for one that shares a row with another token."""
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in tokens}
    texts = {number: text for text, number in known.items()}
    for token, number in ids.items():
        if token not in known and number in texts:
            raise InvalidArgument(
                f"{type(tokenizer).__name__} gives {token!r} the id {number} of {texts[number]!r}: it was not added, "
                "and the model is as it was; tokenizers that lower-case text have added tokens in lower case only, "
                "unless they are special=True"
            )
    return ids


def _resize(vocabulary: Vocabulary, rows: int, initial: InitialRows, fresh: Sequence[int], optimizer: Any) -> None:
    """Write the fresh rows of every tensor, which grows to `rows` if it has fewer."""
    for held in vocabulary.tensors:
        whole = with_rows(whole_of(held.tensor), rows)
        initial.write(whole, fresh)
        if rows == vocabulary.rows:
            overwrite(held.tensor, whole)
            continue
        new = replace_tensor(vocabulary.model, held, whole)
        if optimizer is not None and isinstance(new, nn.Parameter):
            replace_parameter(optimizer, held.tensor, new, whole)
    if rows != vocabulary.rows:
        set_rows(vocabulary, rows)
