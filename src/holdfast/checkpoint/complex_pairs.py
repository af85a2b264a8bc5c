"""Complex numbers, which are stored as pairs of reals, as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def as_complex(array: npt.NDArray[Any], logical: str) -> npt.NDArray[Any]:
    """View pairs of reals as complex numbers; numpy has no complex32, so it becomes complex64."""
    if logical == "complex32":
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).view(np.complex64 if logical == "complex32" else np.complex128)[..., 0]
