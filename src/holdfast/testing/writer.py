"""The writer process with a fault in its storage; started instead of the plain one for tests of runs."""

from __future__ import annotations

import os

from holdfast.persist import writer
from holdfast.storage import storage_at
from holdfast.testing.faults import FAULTS_VARIABLE, Fault, FaultGate
from holdfast.testing.watched import watched


def main(line: int) -> None:
    """As `holdfast.persist.writer.main`, with the fault of the environment in what it opens, counted over all."""
    gate = FaultGate(Fault.parse(os.environ[FAULTS_VARIABLE]))
    writer.main(line, lambda address: watched(storage_at(address), gate))
