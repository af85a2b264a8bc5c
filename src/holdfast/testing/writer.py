"""The writer process with a fault in its storage; started instead of the plain one for tests of runs."""

from __future__ import annotations

from holdfast.persist import writer
from holdfast.storage import storage_at
from holdfast.testing.faults import Fault, FaultGate
from holdfast.testing.watched import watched


def main(line: int, fault: str) -> None:
    """Run `holdfast.persist.writer.main` with one fault, counted over every storage that the writer opens."""
    gate = FaultGate(Fault.parse(fault))
    writer.main(line, lambda address: watched(storage_at(address), gate))
