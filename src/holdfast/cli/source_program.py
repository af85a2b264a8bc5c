"""The program of another tool's export as `holdfast show` prints it: the operators, and each line of a program file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.cli.render import count
from holdfast.sources.foreign import Foreign
from holdfast.sources.paddle.pir.pir_program import PirProgram
from holdfast.sources.paddle.pir.pir_text import program_lines

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpoint import Checkpoint


def source_program_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the program of an export as fields of the JSON output; empty if there is none."""
    source = checkpoint.source_program if isinstance(checkpoint, Foreign) else None
    if source is None:
        return {}
    fields = {"format": source.format, "operators": dict(source.operators), "runs": source.translated is not None}
    return {"program": {**fields, "refusal": source.refusal or None}}


def source_program_text(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield lines about the program of an export: the operators, and the whole program if its file was opened."""
    source = checkpoint.source_program if isinstance(checkpoint, Foreign) else None
    if source is None:
        return
    operators = ", ".join(f"{number} {name}" for name, number in source.operators.items())
    yield f"program ({source.format}): {count(sum(source.operators.values()), 'operator')}: {operators}"
    if checkpoint.path.endswith(".json") and isinstance(source.plain, PirProgram):
        yield from (f"  {line}" for line in program_lines(source.plain))
