"""AOA configs: Paddle's programs as a dict, read as Paddle reads them.

Models' files write one program for all their variants, so that a statement may match nothing, a part of a split may
be used by nobody, and heads of q may be wider than those of k. Statements of a config are marked `aoa`: they are
optional, what they make and nothing uses is dropped, and heads of q, k and v may have different sizes. Everything else
is as strict as in any other mapping.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.core.warnings import warn

STATEMENTS = "aoa_statements"
_REVERSE = "aoa_config_reverse"
_KNOWN = (STATEMENTS, _REVERSE, "enable_traceback")  # the last is about Paddle's own error messages


def is_reversed(config: Mapping[str, Any], origin: str) -> bool:
    """Whether a config stands for the reverse of its statements; raises InvalidArgument for misspelt entries."""
    for key in config:
        if key in _KNOWN:
            continue
        near = difflib.get_close_matches(str(key), _KNOWN, 1, 0.7)
        if near:
            raise InvalidArgument(f"{origin}{key!r} of the AOA config is not known; did you mean {near[0]!r}?")
        warn(f"mapping: {origin}{key!r} of the AOA config is not known, and was ignored; known are {', '.join(_KNOWN)}")
    value = config.get(_REVERSE, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{origin}{_REVERSE} is True or False, not {value!r}")
    return value
