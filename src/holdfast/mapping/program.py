"""`Mapping`, a parsed program: from text, file, list, AOA config or built-in name; compile, reverse, explain."""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.format import strictjson
from holdfast.mapping import families
from holdfast.mapping.aoa import STATEMENTS, is_reversed
from holdfast.mapping.compile.compile import Compiled, TargetTP, compile_program
from holdfast.mapping.explain import Keys, explain, specs_of
from holdfast.mapping.pin_sizes import pin_statements
from holdfast.mapping.reverse import reversed_program
from holdfast.mapping.syntax import guess
from holdfast.mapping.syntax.grammar import statements_of
from holdfast.mapping.syntax.statement import Spec, Statement

MappingSource: TypeAlias = "str | os.PathLike[str] | Sequence[str] | abc.Mapping[str, Sequence[str]] | Mapping"


@dataclass(frozen=True, slots=True)
class Mapping:
    """A program that builds target tensors from source tensors with other names and shapes."""

    statements: tuple[Statement, ...] = ()

    @staticmethod
    def parse(
        written: MappingSource, config: abc.Mapping[str, Any] | None = None, keys: Iterable[str] | None = None
    ) -> Mapping:
        """Parse a mapping from text, a file, a list of statements, an AOA config or a built-in name.

        An AOA config is {"aoa_statements": [...]}, optionally with "aoa_config_reverse" (see `aoa`).

        A file contains the program text, or the list or object as JSON. A single line without `->` is a
        built-in name (see `families`) or a file name. `config` is the model's config.json and `keys` are the
        Hugging Face keys, if known; built-in mappings use both.
        Raises InvalidArgument with line and column, or NotFound for a missing file.
        """
        if isinstance(written, Mapping):
            return written
        if config is not None and hasattr(config, "to_dict"):
            config = config.to_dict()  # as transformers has it
        if isinstance(written, str):
            return _from_text(written, config, keys)
        if isinstance(written, os.PathLike):
            return _from_file(Path(written))
        return _from_value(written, "")

    def __str__(self) -> str:
        return "".join(f"{statement}\n" for statement in self.statements)

    def reverse(self, shapes: abc.Mapping[str, Any] | None = None) -> Mapping:
        """Return the mapping that rebuilds the sources from the targets.

        Joined tensors are split by `sizes=`, by the `shapes` of the sources, or by the target shapes known when
        the reverse is compiled. Raises InvalidArgument for a statement without an inverse.
        """
        known = None if shapes is None else specs_of(shapes)
        statements = self.statements if known is None else pin_statements(self.statements, known)
        return Mapping(tuple(reversed_program(statements)))

    def with_optional_statements(self) -> Mapping:
        """Return the same mapping for a part of its sources: a statement may match nothing."""
        return Mapping(tuple(replace(own, options=replace(own.options, optional=True)) for own in self.statements))

    def explain(
        self, keys: Keys, targets: Keys | None = None, *, source_tp: int | None = None, target_tp: TargetTP = None
    ) -> str:
        """Describe the origin of every target: target boxes, source boxes, order of dims and casts.

        `keys` are {key: shape}, {key: (shape, dtype)}, specs, or bare keys; bare keys give only names.
        """
        return explain(self.statements, keys, targets, source_tp=source_tp, target_tp=target_tp)

    def compile(
        self,
        sources: abc.Mapping[str, Spec],
        targets: abc.Mapping[str, Spec | None] | None = None,
        *,
        source_tp: int | None = None,
        target_tp: TargetTP = None,
        spare: Container[str] = (),
        lenient: Callable[[str], bool] = lambda name: False,
    ) -> Compiled:
        """Compile the program for these sources into one recipe per target.

        `targets` None means every name that no statement consumes. `source_tp` is the TP degree of fused
        sources; `target_tp` is that of fused targets, or a function from key to degree. Targets may replace
        unused sources listed in `spare`. The caller handles mismatches of targets for which `lenient` is true.
        Raises Mismatch where statements, keys and shapes do not fit together.
        """
        return compile_program(
            self.statements,
            sources,
            targets,
            source_tp=source_tp,
            target_tp=target_tp,
            spare=spare,
            lenient=lenient,
        )


def _from_text(text: str, config: abc.Mapping[str, Any] | None, keys: Iterable[str] | None) -> Mapping:
    if "->" in text or "\n" in text or guess.has_arrow(text) or not text.partition("#")[0].strip():
        return _within_limit(statements_of(text))
    if families.is_name(text):
        program = families.builtin_program(text, config, keys)
        mapping = _within_limit(statements_of(program.text, f"{text}, "))
        mapping = _with_renames(mapping.reverse(), program.renames) if program.reversed else mapping
        return Mapping(tuple(replace(own, origin=f"{text}, ", builtin=True) for own in mapping.statements))
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # not a valid file name
        is_file = False
    if is_file:
        return _from_file(Path(text))
    if "/" in text or os.sep in text or Path(text).suffix:
        raise NotFound(f"{text[:200]}: no such mapping file")
    raise InvalidArgument(
        f"{text[:200]!r} is not a mapping: it is neither a statement such as `a -> b`, nor an existing file, nor a "
        f"built-in name; {families.nearest(text[:200])}"
    )


def _with_renames(mapping: Mapping, renames: abc.Mapping[str, str]) -> Mapping:
    """Prepend statements that rename the sources of other library versions to the names in the mapping."""
    lines = []
    for other, usual in renames.items():
        keys = (key.pattern for statement in mapping.statements for key in statement.lefts)
        lines += [f"{key.replace(usual, other)} -> {key}, optional\n" for key in keys if usual in key]
    return Mapping((*statements_of("".join(dict.fromkeys(lines)), "names of other versions, "), *mapping.statements))


def _from_file(path: Path) -> Mapping:
    try:
        with path.open("rb") as file:
            data = file.read(limits.MAPPING_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such mapping file") from None
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot read the mapping: {error.strerror}") from error
    if len(data) > limits.MAPPING_BYTES:
        raise InvalidArgument(f"{path}: a mapping can have at most {limits.MAPPING_BYTES} bytes")
    if data.lstrip()[:1] in (b"{", b"["):
        return _from_value(strictjson.loads(data, str(path)), f"{path}, ")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not valid UTF-8 at byte {error.start}") from None
    return _within_limit(statements_of(text, f"{path}, "))


def _from_value(value: object, origin: str) -> Mapping:
    if isinstance(value, abc.Mapping):
        if STATEMENTS not in value:
            raise InvalidArgument(f"{origin}a mapping object needs the entry {STATEMENTS!r}; found {list(value)[:5]}")
        return _from_config(value, origin)
    if not isinstance(value, abc.Sequence) or isinstance(value, str | bytes):
        raise InvalidArgument(f"{origin}a mapping is text, a file or a list of statements, not {type(value).__name__}")
    return _within_limit(_parse_list(value, origin))


def _from_config(config: abc.Mapping[str, Any], origin: str) -> Mapping:
    """Build a mapping from an AOA config, whose other entries say how to read its statements."""
    reverse = is_reversed(config, origin)
    statements = _from_value(config[STATEMENTS], origin).statements
    mapping = Mapping(tuple(replace(statement, aoa=True) for statement in statements))
    return mapping.reverse() if reverse else mapping


def _parse_list(items: Sequence[object], origin: str) -> Iterator[Statement]:
    """Parse a list of statements; line numbers are positions in the list."""
    size = 0
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidArgument(f"{origin}line {number + 1}: a statement is a string, not {type(item).__name__}")
        size += len(item)
        if size > limits.MAPPING_BYTES:
            raise InvalidArgument(f"{origin}line {number + 1}: a mapping can have at most {limits.MAPPING_BYTES} bytes")
        yield from statements_of(item, origin, number + 1)


def _within_limit(statements: Iterator[Statement]) -> Mapping:
    found: list[Statement] = []
    for statement in statements:
        if len(found) >= limits.MAPPING_STATEMENTS:
            raise statement.error(f"the mapping has more than {limits.MAPPING_STATEMENTS} statements", InvalidArgument)
        found.append(statement)
    return Mapping(tuple(found))
