"""JSON as the page receives it: numbers that JSON lacks as text, and no character that HTML or a script could read."""

from __future__ import annotations

import json
import math
from typing import Any

_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def to_json(value: Any) -> bytes:
    """Encode a value as ASCII. NaN and infinities become the strings "NaN", "Infinity" and "-Infinity".

    Markup characters are escaped, so that the text is harmless in a script element too.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)  # outside of strings JSON has none of them
    return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
