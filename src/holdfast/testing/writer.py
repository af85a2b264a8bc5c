"""The writer process with a fault in its storage; started instead of the plain one for tests of runs."""

from __future__ import annotations

import os

from holdfast.persist import writer
from holdfast.storage import Storage, storage_at
from holdfast.testing.faults import FAULTS_VARIABLE, faulty


def _open(address: str) -> Storage:
    return faulty(storage_at(address), os.environ[FAULTS_VARIABLE])


def main(line: int) -> None:
    """As `holdfast.persist.writer.main`, with the fault of the environment in every storage it opens."""
    writer.main(line, _open)
