"""Content of Megatron's checkpoints that the hub has no place for: rows that pad the vocabulary, `_extra_state`.

Both depend on the checkpoint, so that no built-in program can name them ahead. They are dropped where a
built-in mapping leads to the hub's names, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.mapping import families
from holdfast.mapping.program import Mapping as Program
from holdfast.mapping.syntax.grammar import statements_of
from holdfast.mapping.syntax.statement import Key, Spec, Statement

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_EXTRA_STATE = "._extra_state"
_DIVISIBLE, _RANKS = 128, 8  # Megatron's default of --make-vocab-size-divisible-by; ranks of a usual host
_USUAL_PADDING = 0.1  # of all rows: a larger share may be tokens, and vocab_size a wrong number


def leads_to_hub(written: Any, *, reverse: bool) -> bool | None:
    """Return True if a mapping is a built-in one that makes the hub's names, None if it is the user's own."""
    if not (isinstance(written, str) and families.is_name(written)):
        return None
    return families.is_reverse(written) != reverse


def without_extras(
    program: Program, stored: Mapping[str, Spec], config: Mapping[str, Any] | None
) -> tuple[Program, tuple[str, ...]]:
    """Return a built-in program that drops what the hub has no place for, and a note for each kind of it.

    Rows at or above the config's `vocab_size` are those that Megatron adds to make the vocabulary divisible:
    no token has them.
    """
    notes: list[str] = []
    extra = [key for key in stored if key.endswith(_EXTRA_STATE)]
    dropped = statements_of("".join(f"{Key((key,)).pattern} -> _\n" for key in extra)) if extra else ()
    if extra:
        notes.append(f"dropped {len(extra)} _extra_state of Megatron's layers, which the hub's models do not have")
    size = None if config is None else config.get("vocab_size")
    statements: list[Statement] = []
    for statement in program.statements:
        name = statement.lefts[0].pattern if len(statement.lefts) == 1 else ""
        rows = stored[name].shape[0] if name in _VOCABULARY and name in stored else 0
        if isinstance(size, int) and 0 < size < rows:
            statements += _cut(statement, name, size, rows)
            notes.append(_cut_note(name, size, rows))
        else:
            statements.append(statement)
    return replace(program, statements=(*dropped, *statements)), tuple(notes)


def padding_note(keys: Mapping[str, Spec]) -> str | None:
    """Return a note about the rows of a vocabulary on the way to Megatron, which may pad them; None for many paddings.

    Rows that divide by 128, Megatron's default, fit small tensor-parallel sizes, and by 1024 most of them.
    """
    names = [name for name in _VOCABULARY if name in keys]
    rows = keys[names[0]].shape[0] if names else 0
    if rows % (_DIVISIBLE * _RANKS) == 0:
        return None
    size = next((size for size in (4, 2, 1) if rows % (_DIVISIBLE * size) == 0), 0)
    fits = f", which by default fits a tensor-parallel size of {size}" if size else ""
    return (
        f"{' and '.join(names)}: {rows} rows{fits}; Megatron pads them to a multiple of "
        f"--make-vocab-size-divisible-by ({_DIVISIBLE}) x its tensor-parallel size: if the run has more rows, first "
        f"holdfast resize-vocab SRC PADDED --size {rows} --pad-to N, with that product for N, and convert PADDED"
    )


def _cut_note(name: str, size: int, rows: int) -> str:
    """Return a note about dropped rows, which only config.json calls padding."""
    note = f"{name}: dropped rows {size} to {rows - 1}: by config.json vocab_size is {size}, so that they are padding"
    if rows - size <= rows * _USUAL_PADDING:
        return note
    return (
        f"{note}; check it: they are {100 * (rows - size) // rows}% of {rows} rows; if the tokenizer has more than "
        f"{size} tokens, their weights are lost"
    )


def _cut(statement: Statement, name: str, size: int, rows: int) -> tuple[Statement, ...]:
    """Return statements that take the first rows of a weight where one statement took all."""
    target, padding = statement.rights[0], f"padding.{name}"
    return tuple(
        statements_of(f"{name} -> {target.pattern}, {padding}, axis=0, sizes=[{size}, {rows - size}]\n{padding} -> _\n")
    )
