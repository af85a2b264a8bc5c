"""The writer process with a fault in its storage; tests start it in place of the normal one."""

from __future__ import annotations

from holdfast.storage import storage_at
from holdfast.testing.faults import Fault, FaultGate
from holdfast.testing.watched import watched
from holdfast.writer import process


def main(line: int, fault: str) -> None:
    """Run `holdfast.writer.process.main` with one fault, counted over all storages that the writer opens."""
    gate = FaultGate(Fault.parse(fault))
    process.main(line, lambda address: watched(storage_at(address), gate))
