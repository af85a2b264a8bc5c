"""`examine`: all checks of a machine, and of a root if one is given, in the order in which they are printed."""

from __future__ import annotations

from holdfast.doctor.diagnosis import Diagnosis
from holdfast.doctor.memory_checks import check_memory_limit, check_page_locking, check_shared_memory
from holdfast.doctor.run_needs import RunNeeds
from holdfast.doctor.software_checks import InstalledTorch, check_clock, check_gpus, check_torch, gpus_of_machine
from holdfast.doctor.storage_checks import check_storage, is_shared
from holdfast.storage.base import SharedStorage


def examine(storage: SharedStorage | None, needs: RunNeeds, *, for_gpus: bool) -> list[Diagnosis]:
    """Check this machine, and the storage of a root. `for_gpus`: for a run with GPUs, even if there is none here."""
    torch, found = InstalledTorch.ask(), gpus_of_machine()
    has_gpus = for_gpus or bool(torch.gpus or found)
    return [
        check_torch(torch),
        check_gpus(torch, found),
        check_shared_memory(needs),
        check_memory_limit(needs),
        check_page_locking(needs, has_gpus=has_gpus),
        *(check_storage(storage, needs) if storage is not None else []),
        check_clock(shared=storage is not None and is_shared(storage)),
    ]
