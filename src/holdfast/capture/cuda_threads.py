"""CUDA on Holdfast's own threads: the parent's device, without breaking a CUDA graph that is being recorded."""

from __future__ import annotations

import ctypes

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def uses_cuda() -> bool:
    """Return True if this process has started CUDA.

    A save must not start CUDA for a process that trains on the CPU: a context takes hundreds of megabytes of a GPU.
    A process forked from one that uses CUDA cannot start it at all.
    """
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_device() -> int | None:
    """Return this thread's CUDA device, to hand to another thread; None if the process does not use CUDA."""
    return torch.cuda.current_device() if uses_cuda() else None


def enter_thread(device: int | None) -> None:
    """Use the device of the parent thread, without breaking a CUDA graph that it may be recording."""
    if device is None:
        return
    torch.cuda.set_device(device)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # not NVIDIA's driver: it has no such mode
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
