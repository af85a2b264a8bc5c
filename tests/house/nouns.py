"""One noun, one meaning: no two classes, and no two files of different packages, share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import files, place, tree_of

# File names that stand for the same idea in several packages.
ALLOWED_FILES = {
    "__init__": "packages have one each",
    "__main__": "programs have one each",
    "base": "what the modules of a folder have in common",
    "huggingface": "sources reads Hugging Face's folders, adapters its live models",
}
# A command of the command line has the name of what it calls.
COMMANDS = "cli/"
# Class names with the same meaning wherever they stand.
ALLOWED_CLASSES: dict[str, str] = {
    "HoldfastCheckpoint": "of lightning.pytorch, and of pytorch_lightning, whose base classes differ",
}


def find() -> Iterator[str]:
    """Yield a line for each name that two classes or two files share."""
    classes: dict[str, list[str]] = defaultdict(list)
    stems: dict[str, list[str]] = defaultdict(list)
    for path in files():
        if path.stem not in ALLOWED_FILES and not place(path).startswith(COMMANDS):
            stems[path.stem].append(place(path))
        for name in _classes(path):
            classes[name].append(place(path))
    for name, places in sorted(stems.items()):
        if len(places) > 1:
            yield f"the file name {name} is used {len(places)} times: {', '.join(places)}"
    for name, places in sorted(classes.items()):
        if len(places) > 1 and name not in ALLOWED_CLASSES:
            yield f"the class name {name} is used {len(places)} times: {', '.join(places)}"


def _classes(path: Path) -> list[str]:
    return [node.name.lstrip("_") for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
