"""docs/architecture.md lists every module by its first line: `python -m tests.house.modules` writes the list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import PACKAGE, REPOSITORY, files, place, tree_of

PAGE = REPOSITORY / "docs" / "architecture.md"
HEADING = "## Modules\n"


def section() -> str:
    """Return the section: a table for each folder, public modules first, then packages in alphabetical order."""
    folders: dict[Path, list[Path]] = {}
    for path in files():
        folders.setdefault(path.parent, []).append(path)
    text = (
        HEADING
        + "Every module and its first line, for a search. `python -m tests.house.modules` writes this section.\n"
    )
    for folder in sorted(folders):
        name = "" if folder == PACKAGE else f"{place(folder)}/"
        about = _first_line(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
        text += f"\n**`{name or 'holdfast/'}`** {about}\n\n| module | content |\n|---|---|\n"
        for path in folders[folder]:
            if path.name != "__init__.py":
                text += f"| `{name}{path.name}` | {_first_line(path)} |\n"
    return text


def find() -> Iterator[str]:
    """Yield a line if the section is not the one that the docstrings give."""
    if HEADING + PAGE.read_text().partition(HEADING)[2] != section():
        yield "docs/architecture.md: the section Modules is out of date: run python -m tests.house.modules"


def _first_line(path: Path) -> str:
    text = (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEADING)[0] + section())
