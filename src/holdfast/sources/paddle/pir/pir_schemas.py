"""The schemas of the aten operators that translated programs call, as torch 2.13 has them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("pir_schemas.txt")


@cache
def _schemas() -> dict[str, str]:
    lines = _TABLE.read_text(encoding="ascii").splitlines()
    pairs = (line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return {f"aten.{name}": schema for name, schema in pairs}


def schema_of(op: str) -> str:
    """Return the schema of an operator such as "aten.matmul.default"."""
    return _schemas()[op]
