"""The page's own files: those of the package's folder `static`, read once, by an allow-list of names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_NAME = re.compile(r"[a-z0-9_]+\.(?:html|js|css|svg|txt)")
INDEX = "index.html"


def read_static() -> Mapping[str, tuple[bytes, str]]:
    """Return the contents and type of every file of the page, by name."""
    folder = files("holdfast.web") / "static"
    found = {}
    for file in folder.iterdir():
        if _NAME.fullmatch(file.name):
            found[file.name] = file.read_bytes(), _TYPES[file.name[file.name.rindex(".") :]]
    return found
