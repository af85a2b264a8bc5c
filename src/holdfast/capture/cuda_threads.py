"""Setup of Holdfast's own threads before they call CUDA."""

from __future__ import annotations

import ctypes

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def current_device() -> int | None:
    """Return the CUDA device of this thread, or None without CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


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
