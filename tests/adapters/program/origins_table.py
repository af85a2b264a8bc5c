"""Writes the table of origins into docs/program.md: `python -m tests.adapters.program.origins_table [NAME ...]`.

With names, it prints the rows of these architectures only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.adapters.program.architectures import ARCHITECTURES, NOT_DECOMPOSED
from tests.adapters.program.exported_architectures import Exported, count_origins, export_architecture

PAGE = Path(__file__).parents[3] / "docs" / "program.md"
HEAD = (
    "| architecture | operators | with path | with source | in core aten | with path | with source | with composite | "
    "from another operator |"
)
_BEGIN, _END = "<!-- origins: begin -->\n", "<!-- origins: end -->\n"


def table_row(exported: Exported) -> str:
    """Return the row of one architecture: counts in the training dialect and in core aten, or why torch has none."""
    training = count_origins(exported, "training")
    cells = [exported.name, training.operators, training.modules, training.lines]
    if exported.core is None:
        cells += [NOT_DECOMPOSED[exported.name], "", "", "", ""]
    else:
        core = count_origins(exported, "core")
        cells += [core.operators, core.modules, core.lines, core.composites, core.renamed]
    return f"| {' | '.join(map(str, cells))} |"


def rows_of_page() -> dict[str, str]:
    """Return the rows of the table in the documentation by architecture."""
    lines = PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0].splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and line != HEAD}


def versions() -> str:
    """Return the sentence of the page that says which versions the counts are of."""
    import transformers

    return f"With torch {torch.__version__.partition('+')[0]} and transformers {transformers.__version__}"


def main() -> None:
    names = sys.argv[1:]
    rows = []
    for name in names or ARCHITECTURES:
        rows.append(table_row(export_architecture(name)))
        print(rows[-1], flush=True)
    if not names:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        ruler = "|---|" + "--:|" * (HEAD.count("|") - 2)
        table = "\n".join((f"{versions()}:", "", HEAD, ruler, *rows, ""))
        PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
