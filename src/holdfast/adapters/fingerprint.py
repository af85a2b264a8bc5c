"""Fingerprints: do replicas hold the same values? Cheap, and computed where the tensor lives."""

from __future__ import annotations

import torch

from holdfast.adapters.tensors import raw_array
from holdfast.format.digest import digest_hex
from holdfast.plan.arrays import bytes_of


def fingerprint(tensor: torch.Tensor) -> str:
    """A text that equal tensors share: a digest on the CPU, two sums over the bits on a device."""
    if tensor.device.type == "cpu":
        return digest_hex(bytes_of(raw_array(tensor.contiguous())))
    # One element counts as contiguous whatever its stride, and could not be viewed as bytes.
    bits = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    # In slices: the weights and wide integers would otherwise be sixteen times the tensor.
    for begin in range(0, bits.numel(), 1 << 24):
        part = bits[begin : begin + (1 << 24)].to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + part.numel(), device=tensor.device) * 0x9E3779B1
        total[0] += part.sum()
        total[1] += (part * weights).sum()
    return ":".join(f"{value & (2**64 - 1):x}" for value in total.tolist())
