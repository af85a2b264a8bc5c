"""Make cases of gathered AOA programs: sources with the shapes that a program needs, and its targets.

A model's program says which keys it wants. Its sources get the hub's orientation and sizes that divide evenly; what
the forward program makes of them are the sources of the inverse one, whose targets are those that the forward
program began with.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Mapping, Sized
from holdfast.mapping.syntax.statement import Hole, Key
from tests.interop.aoa_gather import EXPERTS, GROUPS, HEADS, LAYERS, Gathered, Spec

Specs = dict[str, Spec]

WIDTH, HEAD = 96, 24
_RANGES = {"LAYER_ID": range(LAYERS), "EXPERT_ID": range(EXPERTS), "*": range(EXPERTS)}
_FLAT = re.compile(r"(norm[^.]*\.weight|\.norm[12]?\.weight|bias|A_log|ln_[a-z]*\.weight|sinks?|_scale|alpha|beta)$")


@dataclass(frozen=True, slots=True)
class Case:
    """A program with its sources; `targets` None stands for all that the program leaves over."""

    name: str
    config: dict[str, Any]
    sources: Specs
    targets: Specs | None = None
    source_tp: int = 1
    target_tp: int = 1
    axis: dict[str, int] = field(default_factory=dict)
    forward: dict[str, Any] | None = None  # of an inverse program: what it is the inverse of


def cases_of(programs: Iterable[Gathered]) -> Iterator[Case]:
    """A case of every program. The targets of a model's program are the sources of its other direction."""
    programs = list(programs)
    by_title = {(program.other, program.direction): program for program in programs if program.other}
    for program in programs:
        if program.sources is not None:
            yield Case(program.name, program.config, program.sources, program.targets)
        elif not program.other:
            sources = sources_of(program.config)
            # With targets: without, Paddle's engine gives the names of its own temporaries to what is fused.
            yield Case(program.name, program.config, sources, outputs_of(program.config, sources) or None)
        elif program.direction == "forward":
            case = _forward_case(program, _partner(program, by_title))
            yield case
            if "(" not in program.name:
                yield _reversed_case(program)
                if case.targets is not None:
                    yield replace(case, name=f"{case.name}, for two tensor-parallel ranks", target_tp=2)
        else:
            yield _inverse_case(program, _partner(program, by_title))


def _partner(program: Gathered, by_title: dict[tuple[str, str], Gathered]) -> Gathered | None:
    """The other direction. Where a variant's is the plain model's, it was gathered under that name alone."""
    other = "inverse" if program.direction == "forward" else "forward"
    plain = program.other.partition(" (")[0]
    return by_title.get((program.other, other)) or by_title.get((plain, other))


def _forward_case(program: Gathered, inverse: Gathered | None) -> Case:
    sources = sources_of(program.config)
    made = outputs_of(program.config, sources)
    wanted = sources_of(inverse.config) if inverse is not None else {}
    return Case(program.name, program.config, sources, {key: made[key] for key in wanted if key in made} or None)


def _reversed_case(program: Gathered) -> Case:
    """The forward program with the flag that reverses it."""
    begun = sources_of(program.config)
    config = {**program.config, "aoa_config_reverse": True}
    return Case(f"{program.name}, reversed", config, outputs_of(program.config, begun), begun, forward=program.config)


def _inverse_case(program: Gathered, forward: Gathered | None) -> Case:
    begun = sources_of(forward.config) if forward is not None else {}
    made = outputs_of(forward.config, begun) if forward is not None else {}
    sources = {key: made.get(key, spec) for key, spec in sources_of(program.config).items()}
    reached = outputs_of(program.config, sources)
    return Case(
        program.name,
        program.config,
        sources,
        {key: spec for key, spec in begun.items() if key in reached} or None,
        forward=forward.config if forward is not None else None,
    )


def sources_of(config: dict[str, Any]) -> Specs:
    """Keys that a program uses and does not make before, with shapes."""
    made: set[str] = set()
    out: Specs = {}
    statements = _parsed(config).statements
    if not statements:  # refused: the names alone, so that Paddle has something to refuse as well
        lefts = (text.partition("->")[0] for text in config["aoa_statements"])
        keys = (Mapping.parse(f"{left} -> _").statements[0].lefts for left in lefts if "^T" not in left)
        return {name: (shape_of(name), "bfloat16") for some in keys for key in some for name in _names(key)}
    for statement in statements:
        for name in (name for key in statement.lefts for name in _names(key)):
            if name not in made and name not in out:
                out[name] = (shape_of(name), "bfloat16")
        made.update(name for key in statement.rights for name in _names(key))
    return out


def outputs_of(config: dict[str, Any], sources: Specs) -> Specs:
    """What Holdfast makes of sources: keys with shapes and dtypes; nothing where it refuses."""
    try:
        compiled = _parsed(config).compile(sized(sources), source_tp=1, target_tp=1)
    except HoldfastError:
        return {}
    return {key: (list(recipe.shape), recipe.dtype.name) for key, recipe in compiled.recipes.items()}


def sized(specs: Specs) -> dict[str, Sized]:
    return {key: Sized(tuple(shape), dtype_named(dtype)) for key, (shape, dtype) in specs.items()}


def _parsed(config: dict[str, Any]) -> Mapping:
    try:
        return Mapping.parse(config)
    except HoldfastError:
        return Mapping()


def _names(key: Key) -> Iterator[str]:
    """The names that a key stands for, with small numbers in its holes."""
    names = dict.fromkeys(hole.name for hole in key.holes)
    for numbers in itertools.product(*(_RANGES[name] for name in names)):
        values = dict(zip(names, numbers, strict=True))
        for single in key.members():
            pieces = (
                str(values[piece.name] + piece.offset) if isinstance(piece, Hole) else piece for piece in single.pieces
            )
            yield "".join(pieces)


def shape_of(name: str) -> list[int]:
    """A shape for a key of the hub: vectors by their name, else [out, in]."""
    wide = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    found = re.search(r"\b([qkv])_proj\.(weight|bias)$", name)
    out = wide[found[1]] if found else WIDTH
    if "qwen3_next" in name:
        out *= 2
    return [out] if _FLAT.search(name) else [out, WIDTH]
