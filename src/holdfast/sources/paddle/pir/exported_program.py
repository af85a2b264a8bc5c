"""Read the program of an export: as plain data, and as a Holdfast program where every operator has a counterpart."""

from __future__ import annotations

from holdfast.core.errors import Unsupported
from holdfast.sources.paddle.pir.pir_json import read_pir
from holdfast.sources.paddle.pir.pir_translation import translate
from holdfast.sources.source_program import SourceProgram

FORMAT = "paddle pir"


def read_exported(data: bytes, where: str) -> SourceProgram | None:
    """Return the program of a JSON file of `paddle.jit.save`; None for other JSON."""
    plain = read_pir(data, where)
    if plain is None:
        return None
    name = f"{FORMAT} {plain.version}"
    try:
        return SourceProgram(name, plain.counts(), plain, translate(plain, where))
    except Unsupported as refusal:
        return SourceProgram(name, plain.counts(), plain, None, str(refusal))
