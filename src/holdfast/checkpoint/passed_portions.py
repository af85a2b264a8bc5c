"""One portion on its way between ranks: a byte that says whether it is good, then its ranges."""

from __future__ import annotations

from holdfast.core.ranks import RankLinks
from holdfast.plan.files import RawArray
from holdfast.plan.passing import Transfer

_GOOD, _FAILED = b"\1", b"\0"


def send_portion(links: RankLinks, transfer: Transfer, buffer: RawArray, *, good: bool) -> None:
    """Send a portion to its receivers, or that it could not be read."""
    for rank in transfer.receivers:
        links.send(rank, transfer.number, memoryview(bytearray(_GOOD if good else _FAILED)))
        if good:
            for start, size in transfer.portion.ranges:
                links.send(rank, transfer.number, buffer[start : start + size].data)


def receive_portion(links: RankLinks, transfer: Transfer, buffer: RawArray) -> bool:
    """Receive a portion into a buffer; returns False if its sender failed or is lost."""
    assert transfer.sender is not None
    answer = bytearray(1)
    if not links.receive(transfer.sender, transfer.number, memoryview(answer)) or answer != _GOOD:
        return False
    return all(
        links.receive(transfer.sender, transfer.number, buffer[start : start + size].data)
        for start, size in transfer.portion.ranges
    )
