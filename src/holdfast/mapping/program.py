"""`Mapping`: a program of the mapping language, parsed once, used on save, on load and offline."""

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
from holdfast.mapping.pin_sizes import pinned
from holdfast.mapping.reverse import reversed_program
from holdfast.mapping.syntax import guess
from holdfast.mapping.syntax.grammar import statements_of
from holdfast.mapping.syntax.statement import Spec, Statement

Written: TypeAlias = "str | os.PathLike[str] | Sequence[str] | abc.Mapping[str, Sequence[str]] | Mapping"


@dataclass(frozen=True, slots=True)
class Mapping:
    """How the tensors of one naming and shape, the sources, make up those of another, the targets."""

    statements: tuple[Statement, ...] = ()

    @staticmethod
    def parse(
        written: Written, config: abc.Mapping[str, Any] | None = None, keys: Iterable[str] | None = None
    ) -> Mapping:
        """A mapping from a text, a file, a list of statements, an AOA config or a built-in name.

        An AOA config is {"aoa_statements": [...]}, perhaps with "aoa_config_reverse" (see `aoa`).

        A file holds the text, or the list or the object as JSON. A text in one line without `->` is a
        built-in name (see `families`) or that of a file. `config` is the model's config.json and `keys`
        are those on the hub's side, where known: built-in mappings look at them.
        Raises InvalidArgument with line and column, NotFound for a missing file.
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

    def reverse(self, shapes: abc.Mapping[str, Sequence[int]] | None = None) -> Mapping:
        """The mapping that makes the sources again of the targets.

        What was joined is cut by `sizes=`, by `shapes` of the sources, or else by the shapes that the
        targets of the reverse have when it is compiled. Raises InvalidArgument for a statement without an inverse.
        """
        known = None if shapes is None else specs_of(shapes)
        statements = self.statements if known is None else pinned(self.statements, known)
        return Mapping(tuple(reversed_program(statements)))

    def explain(
        self, keys: Keys, targets: Keys | None = None, *, source_tp: int | None = None, target_tp: TargetTP = None
    ) -> str:
        """For every target where it comes from: its boxes, the source's boxes, the order of dims, casts.

        `keys` are {key: shape}, {key: (shape, dtype)} or specs; of keys alone only the names are told.
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
        """What it comes to for these sources: a recipe for every target.

        `targets` None: all that the statements leave over. `source_tp` is the TP degree that fused
        sources were made for, `target_tp` the one of fused targets, or a function from key to degree.
        `spare` are sources that targets may replace unused; `lenient` says of which targets a misfit is
        the caller's business. Raises Mismatch where statements, keys and shapes do not fit.
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
        return _limited(statements_of(text))
    if families.is_name(text):
        program = families.named(text, config, keys)
        mapping = _limited(statements_of(program.text, f"{text}, "))
        return _renamed(mapping.reverse(), program.renames) if program.reversed else mapping
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # no name that a file could have
        is_file = False
    if is_file:
        return _from_file(Path(text))
    if "/" in text or os.sep in text or Path(text).suffix:
        raise NotFound(f"{text[:200]}: there is no such file of statements")
    raise InvalidArgument(
        f"{text[:200]!r} is no mapping: neither a statement such as `a -> b`, nor a file that is there, nor a "
        f"built-in name; {families.nearest(text[:200])}"
    )


def _renamed(mapping: Mapping, renames: abc.Mapping[str, str]) -> Mapping:
    """The mapping after statements that rename sources of another version to those that it knows."""
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
        raise InvalidArgument(f"{path}: cannot be read as a mapping: {error.strerror}") from error
    if len(data) > limits.MAPPING_BYTES:
        raise InvalidArgument(f"{path}: a mapping has at most {limits.MAPPING_BYTES} bytes")
    if data.lstrip()[:1] in (b"{", b"["):
        return _from_value(strictjson.loads(data, str(path)), f"{path}, ")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not text in UTF-8, from byte {error.start} on") from None
    return _limited(statements_of(text, f"{path}, "))


def _from_value(value: object, origin: str) -> Mapping:
    if isinstance(value, abc.Mapping):
        if STATEMENTS not in value:
            raise InvalidArgument(f"{origin}a mapping as an object has the entry {STATEMENTS!r}, not {list(value)[:5]}")
        return _from_config(value, origin)
    if not isinstance(value, abc.Sequence) or isinstance(value, str | bytes):
        raise InvalidArgument(
            f"{origin}a mapping is a text, a file or a list of statements, not {type(value).__name__}"
        )
    return _limited(_listed(value, origin))


def _from_config(config: abc.Mapping[str, Any], origin: str) -> Mapping:
    """A mapping from an AOA config, whose other entries say how to read its statements."""
    reverse = is_reversed(config, origin)
    statements = _from_value(config[STATEMENTS], origin).statements
    mapping = Mapping(tuple(replace(statement, aoa=True) for statement in statements))
    return mapping.reverse() if reverse else mapping


def _listed(items: Sequence[object], origin: str) -> Iterator[Statement]:
    """Statements of a list; the line is the place in it."""
    size = 0
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidArgument(f"{origin}line {number + 1}: a statement is a text, not {type(item).__name__}")
        size += len(item)
        if size > limits.MAPPING_BYTES:
            raise InvalidArgument(f"{origin}line {number + 1}: a mapping has at most {limits.MAPPING_BYTES} bytes")
        yield from statements_of(item, origin, number + 1)


def _limited(statements: Iterator[Statement]) -> Mapping:
    found: list[Statement] = []
    for statement in statements:
        if len(found) >= limits.MAPPING_STATEMENTS:
            raise statement.refusal(f"more than {limits.MAPPING_STATEMENTS} statements", InvalidArgument)
        found.append(statement)
    return Mapping(tuple(found))
