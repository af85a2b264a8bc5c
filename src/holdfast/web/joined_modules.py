"""The page's modules joined into one script, for a report: each becomes a function of its own.

The modules are our own files and keep to a plain form: imports of names at the top, `export` before a
function, class or constant, and no circles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_IMPORT = re.compile(r'^import \{(?P<names>[^}]*)\} from "\./(?P<file>[a-z0-9_]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?P<kind>(?:async )?function\*?|class|const) (?P<name>[A-Za-z0-9_$]+)", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


def join_modules(files: Mapping[str, str], entry: str) -> str:
    """Return one script that runs the module `entry` and all that it imports, in order."""
    order: list[str] = []
    _visit(files, entry, order, ())
    parts = ['"use strict";', "const modules = {};"]
    parts += [f'modules["{name}"] = (() => {{\n{_body(files[name], name)}\n}})();' for name in order]
    return "\n".join(parts) + "\n"


def _visit(files: Mapping[str, str], name: str, order: list[str], above: tuple[str, ...]) -> None:
    if name in order:
        return
    if name in above:
        raise ValueError(f"the modules of the page import each other in a circle: {' -> '.join((*above, name))}")
    for match in _IMPORT.finditer(files[name]):
        _visit(files, match["file"], order, (*above, name))
    order.append(name)


def _body(text: str, name: str) -> str:
    exported = [match["name"] for match in _EXPORT.finditer(text)]
    text = _IMPORT.sub(lambda match: f'const {{{_renamed(match["names"])}}} = modules["{match["file"]}"];', text)
    text = _EXPORT.sub(r"\g<kind> \g<name>", text)
    left = _LEFT.search(text)
    if left is not None:
        raise ValueError(f"{name}: {left[0]!r} is a form that a report cannot join")
    return f"{text}\nreturn {{ {', '.join(exported)} }};"


def _renamed(names: str) -> str:
    return re.sub(r"\b([A-Za-z0-9_$]+) as ([A-Za-z0-9_$]+)", r"\1: \2", names)
