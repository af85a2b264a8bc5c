"""Rows of attacks: the corpus of tests/attacks, each refused or read for what it says."""

from __future__ import annotations

from collections.abc import Sequence

from tests.attacks import bombs, files, headers, names, pickles, versions
from tests.attacks.attack import Attack, problems
from tests.faults.row import HUNG, SURVIVED, WRONG, Row, Tally


def tally(attacks: Sequence[Attack]) -> Tally:
    """Attack with all of them; what is not refused as it should be is wrong."""
    total = Tally()
    for problem in problems(attacks):
        total += SURVIVED if not problem else HUNG if problem.startswith("Hung") else WRONG
    return total


def _row(fault: str, attacks: Sequence[Attack]) -> Row:
    return Row(fault, lambda seed: tally(attacks))


ROWS: tuple[Row, ...] = (
    _row("hostile safetensors headers", headers.ATTACKS),
    _row("hostile names as keys", names.IN_KEYS),
    _row("hostile names as file names", names.IN_FILES),
    _row("hostile names in a weight map", names.IN_WEIGHT_MAP),
    _row("symlink, FIFO, socket, device, folder where a file is expected", files.ATTACKS),
    _row("bombs: huge headers, a million tensors, deep JSON, sparse files", bombs.ATTACKS),
    _row("smuggled pickles", pickles.ATTACKS),
    _row("manifests from the future, from older versions, with odd fields", versions.ATTACKS),
)
