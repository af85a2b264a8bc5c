"""AOA configs, Paddle's programs as a dict: names of their entries, and a test for the reverse direction.

Model files write one program for all variants of a model. Hence a statement may match nothing, a part of a
split may be unused, and q heads may be wider than k heads. Statements of a config are marked `aoa`: they are
optional, their unused results are dropped, and heads of q, k and v may differ in size. All other checks are as
strict as in any other mapping.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.core.warnings import warn

STATEMENTS = "aoa_statements"
_REVERSE = "aoa_config_reverse"
_KNOWN = (STATEMENTS, _REVERSE, "enable_traceback")  # the last controls Paddle's own error messages


def is_reversed(config: Mapping[str, Any], origin: str) -> bool:
    """Return True if a config stands for the reverse of its statements. Raises InvalidArgument for misspelt entries."""
    for key in config:
        if key in _KNOWN:
            continue
        near = difflib.get_close_matches(str(key), _KNOWN, 1, 0.7)
        if near:
            raise InvalidArgument(f"{origin}unknown AOA config entry {key!r}; did you mean {near[0]!r}?")
        warn(f"mapping: {origin}unknown AOA config entry {key!r} was ignored; known entries: {', '.join(_KNOWN)}")
    value = config.get(_REVERSE, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{origin}{_REVERSE} must be True or False, not {value!r}")
    return value
