"""Overlapping memory: elements of one tensor at the same address, and tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def tensor_overlaps(tensor: torch.Tensor) -> bool:
    """Return True if several elements of a strided tensor share an address, as in an expanded tensor."""
    return not tensor.is_contiguous() and _overlaps(tuple(tensor.shape), tensor.stride())


def array_overlaps(array: np.ndarray[Any, Any]) -> bool:
    """Return True if several elements of a numpy array share memory, as after np.broadcast_to."""
    return not array.flags.c_contiguous and _overlaps(array.shape, array.strides, array.itemsize)


def _overlaps(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """Return True if elements of `item` units at these strides overlap."""
    if 0 in shape:
        return False
    steps = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    reach = item
    for stride, size in steps:
        if stride < reach:
            return stride < item or _covers_twice(steps, item)
        reach += stride * (size - 1)
    return False


def _covers_twice(steps: Sequence[tuple[int, int]], item: int) -> bool:
    """Decide by counting the covered units, for strides that alone do not decide."""
    extent = item + sum(stride * (size - 1) for stride, size in steps)
    units = np.zeros(extent, dtype=bool)
    sizes, strides = tuple(size for _, size in steps), tuple(stride for stride, _ in steps)
    np.lib.stride_tricks.as_strided(units, (*sizes, item), (*strides, 1))[...] = True
    return int(np.count_nonzero(units)) != int(np.prod(sizes)) * item


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a strided tensor and the address past its last element."""
    if not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()
