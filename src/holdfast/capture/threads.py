"""Threads of our own beside training: what they need before they call CUDA."""

from __future__ import annotations

import ctypes

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def current_device() -> int | None:
    """Return this thread's CUDA device, to hand to another thread; None if the process does not use CUDA.

    A process that trains on the CPU, or that was forked from one that uses CUDA, must not start CUDA for a save:
    a context takes hundreds of megabytes of a GPU, and a forked process cannot have one.
    """
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def enter_thread(device: int | None) -> None:
    """Use the device of the thread that started this one, without breaking CUDA graphs that it may be recording."""
    if device is None:
        return
    torch.cuda.set_device(device)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # not NVIDIA's driver: there is no such mode to change
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
