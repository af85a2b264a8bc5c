"""Copies to the host leave room for what the trainer reads meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from holdfast.capture.copy import HostCopies

_BYTES = 2 << 30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_is_read_between_portions_and_does_not_wait_for_all_copies() -> None:
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    loss = torch.ones((), device="cuda")
    loss.item()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    begin = torch.cuda.Event(enable_timing=True)
    begin.record(side)
    milliseconds: list[float] = []
    copies = HostCopies(side, begin, ((target, source),))
    thread = threading.Thread(target=lambda: milliseconds.append(copies.run()))
    reads: list[float] = []
    thread.start()
    while thread.is_alive():
        started = time.perf_counter()
        loss.item()
        reads.append((time.perf_counter() - started) * 1000)
    thread.join(60)
    assert torch.equal(target, source.cpu())
    assert len(reads) > 10
    assert max(reads) < milliseconds[0] / 4
