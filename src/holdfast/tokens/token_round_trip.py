"""Special tokens through the tokenizer itself: each is encoded to its one id, and decoded to its text again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.tokens.tokenizer_files import TOKENIZER, TokenEntry


def round_trip_problems(
    files: Mapping[str, bytes], entries: Sequence[TokenEntry], roles: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the special tokens that do not come back, and what could not be checked.

    The tokenizers library reads tokenizer.json. Tokenizers without that file have no definition that can be run
    without code of their own.
    """
    if TOKENIZER not in files:
        return [], [f"round trip of special tokens: there is no {TOKENIZER}"]
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return [], ["round trip of special tokens: the library tokenizers is not installed"]
    try:
        tokenizer: Any = Tokenizer.from_str(files[TOKENIZER].decode())
    except Exception as error:  # noqa: BLE001  (the library raises Exception itself)
        raise Damaged(f"{TOKENIZER} cannot be read by the library tokenizers: {error}") from None
    ids = {entry.text: entry.number for entry in entries}
    specials = {entry.text for entry in entries if entry.is_special} | {text for text in roles.values() if text in ids}
    problems = []
    for text in sorted(specials, key=lambda text: ids[text]):
        found = list(tokenizer.encode(text, add_special_tokens=False).ids)
        if found != [ids[text]]:
            problems.append(f"{text!r} is encoded as {found}, not as its id {ids[text]}")
            continue
        again = tokenizer.decode(found, skip_special_tokens=False)
        if again != text:
            problems.append(f"{ids[text]}, the id of {text!r}, is decoded as {again!r}")
    return problems, []
