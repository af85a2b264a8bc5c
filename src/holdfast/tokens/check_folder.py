"""`holdfast check-tokens`: contradictions between the tokenizer, the configs and the embeddings of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.convert.sidefiles import side_files
from holdfast.core import limits
from holdfast.core.errors import NotFound
from holdfast.sources import open_source
from holdfast.sources.foreign import is_side_file
from holdfast.tokens.stored_vocabulary import CONFIG, is_embedding, stated_rows
from holdfast.tokens.token_round_trip import round_trip_problems
from holdfast.tokens.tokenizer_files import TOKENIZER_CONFIG, TokenEntry, json_fields, role_tokens, token_entries

GENERATION = "generation_config.json"
_CHECKED_ROLES = ("bos_token", "eos_token", "pad_token")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TokenFinding:
    """A contradiction: its kind ("rows", "ids", "round trip" or "roles"), and what is wrong."""

    kind: str
    problem: str


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """The tokens of a folder: how many there are, the rows of each embedding, findings, and what was not checked."""

    path: str
    tokens: int
    rows: Mapping[str, int]
    findings: tuple[TokenFinding, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.findings


def check(path: str | os.PathLike[str]) -> TokenCheck:
    """Check that the tokenizer, the configs and the embeddings of a folder fit each other. Reads no tensor.

    Every id is below the rows of the embeddings, and no token has two ids. Special tokens are one id that decodes to
    them again. The ids of bos, eos and pad agree between tokenizer, config and generation config. A folder without
    weights is checked by its config. Raises NotFound for a folder without a tokenizer.
    """
    where, files, rows = _read(path)
    entries = token_entries(files)
    if not entries:
        raise NotFound(f"{where} has no tokenizer that can be read: no tokenizer.json, and no vocab.json")
    unchecked = [] if rows else ["rows: the folder has no embeddings, only the config's vocab_size"]
    trips, skipped = round_trip_problems(files, entries, role_tokens(files))
    findings = [
        *(TokenFinding("rows", text) for text in _row_problems(files, entries, rows)),
        *(TokenFinding("ids", text) for text in _id_problems(entries)),
        *(TokenFinding("round trip", text) for text in trips),
        *(TokenFinding("roles", text) for text in _role_problems(files, entries)),
    ]
    numbers = {entry.number for entry in entries}
    return TokenCheck(where, len(numbers), rows, tuple(findings), (*unchecked, *skipped))


def _read(path: str | os.PathLike[str]) -> tuple[str, dict[str, bytes], dict[str, int]]:
    """Return the folder's path, its small files, and the rows of its embeddings by key."""
    try:
        checkpoint = open_source(path)
    except NotFound:
        folder = Path(path).expanduser() if "://" not in os.fspath(path) else None
        if folder is None or not folder.is_dir():
            raise
        return str(folder), _small_files(folder), {}
    groups = checkpoint.contents.groups
    modules = [name for name, group in groups.items() if group.kind == "module" and "/" not in name]
    rows = {
        key: recipe.shape[0]
        for name in modules
        for key, recipe in groups[name].tensors.items()
        if is_embedding(key) and recipe.shape
    }
    return checkpoint.path, side_files(checkpoint), rows


def _small_files(folder: Path) -> dict[str, bytes]:
    out = {}
    for file in sorted(folder.iterdir()):
        if file.is_file() and is_side_file(file.name) and file.stat().st_size <= limits.JSON_BYTES:
            out[file.name] = file.read_bytes()
    return out


def _row_problems(files: Mapping[str, bytes], entries: Sequence[TokenEntry], rows: Mapping[str, int]) -> Iterator[str]:
    stated = stated_rows(files, "")
    for key, found in rows.items():
        if stated is not None and found != stated:
            yield f"{key} has {found} rows, but {CONFIG} states vocab_size {stated}"
    bounds = dict(rows) if rows else ({f"{CONFIG}'s vocab_size": stated} if stated is not None else {})
    for what, bound in bounds.items():
        beyond = sorted({(entry.number, entry.text) for entry in entries if entry.number >= bound})
        if beyond:
            shown = ", ".join(f"{text!r} ({number})" for number, text in beyond[:_SHOWN])
            more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
            yield f"{what} has rows up to {bound - 1}: too few for {shown}{more}; holdfast resize-vocab adds rows"


def _id_problems(entries: Sequence[TokenEntry]) -> Iterator[str]:
    """Yield the tokens to which files give different ids, and the ids of several added tokens."""
    ids: dict[str, dict[int, str]] = {}
    texts: dict[int, dict[str, str]] = {}
    for entry in entries:
        ids.setdefault(entry.text, {}).setdefault(entry.number, entry.file)
        texts.setdefault(entry.number, {}).setdefault(entry.text, entry.file)
    for text, found in ids.items():
        if len(found) > 1:
            yield f"{text!r} has several ids: {', '.join(f'{number} in {file}' for number, file in found.items())}"
    for number, named in texts.items():
        if len(named) > 1:
            yield f"{number} is the id of {' and '.join(f'{text!r} in {file}' for text, file in named.items())}"


def _role_problems(files: Mapping[str, bytes], entries: Sequence[TokenEntry]) -> Iterator[str]:
    """Yield disagreements about the ids of bos, eos and pad."""
    by_text = {entry.text: entry.number for entry in entries}
    known = {entry.number for entry in entries}
    named = role_tokens(files)
    for role in named:
        if named[role] not in by_text:
            yield f"{TOKENIZER_CONFIG} names {role} {named[role]!r}, which is no token of the tokenizer"
    for role in _CHECKED_ROLES:
        field = f"{role}_id"
        stated = {name: _ids_in(files, name, field) for name in (CONFIG, GENERATION)}
        for name, numbers in stated.items():
            for number in numbers:
                if number not in known:
                    yield f"{name}: {field} {number} is no token"
        own = by_text.get(named.get(role, ""))
        for name, numbers in stated.items():
            if own is not None and numbers and own not in numbers:
                yield f"{name}: {field} is {_written(numbers)}, but the tokenizer's {role} {named[role]!r} is {own}"
        config, generation = stated[CONFIG], stated[GENERATION]
        if config and generation and not set(config) & set(generation):
            yield f"{field} is {_written(config)} in {CONFIG}, but {_written(generation)} in {GENERATION}"


def _ids_in(files: Mapping[str, bytes], name: str, field: str) -> list[int]:
    """Return the ids of a role in a config, or in the config of its text part."""
    fields = json_fields(files, name)
    scopes = [fields, *(fields[inner] for inner in ("text_config",) if isinstance(fields.get(inner), dict))]
    for scope in scopes:
        value: Any = scope.get(field)
        numbers = value if isinstance(value, list) else [value]
        found = [number for number in numbers if type(number) is int]
        if found:
            return found
    return []


def _written(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else str(list(numbers))
