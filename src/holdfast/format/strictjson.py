"""JSON read strictly: bounded, no duplicate keys, no NaN, no surprises from deep nesting."""

from __future__ import annotations

import json
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged


class _Duplicate(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(f"the key {key[:80]!r} stands twice")
            seen.add(key)
    return out


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def loads(data: bytes, where: str, *, limit_bytes: int = limits.JSON_BYTES) -> Any:
    """Parse strict JSON; every failure is Damaged and names `where`."""
    if len(data) > limit_bytes:
        raise Damaged(f"{where}: {len(data)} bytes of JSON, more than the limit of {limit_bytes}")
    try:
        text = data.decode()
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except RecursionError:
        raise Damaged(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"{where}: not valid JSON: {error}") from None


def dumps(value: Any) -> bytes:
    """Compact JSON whose text depends on the value alone; keys keep their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
