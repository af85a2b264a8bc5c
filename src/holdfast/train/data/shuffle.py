"""Shuffling in constant memory: the sample at any position of any epoch is computed, not stored."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
Indices = NDArray[np.uint64]


def shuffled(positions: Any, length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples at these positions of an epoch: a permutation of range(length) by (seed, epoch).

    A Feistel network permutes the next power of four. Results outside the dataset are permuted again
    until they are inside, which keeps the result a permutation.
    """
    samples = np.asarray(positions, dtype=np.uint64).copy()
    if samples.size == 0:
        return samples.astype(np.int64)
    assert length > 0 and int(samples.max()) < length, "a position beyond the dataset"
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    samples = _network(samples, half_bits, keys)
    outside = samples >= np.uint64(length)
    while outside.any():
        samples[outside] = _network(samples[outside], half_bits, keys)
        outside = samples >= np.uint64(length)
    return samples.astype(np.int64)


def _network(values: Indices, half_bits: int, keys: Indices) -> Indices:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _round_keys(seed: int, epoch: int) -> Indices:
    state = _mix(np.array([seed & (2**64 - 1)], np.uint64)) ^ np.uint64(epoch & (2**64 - 1))
    with np.errstate(over="ignore"):
        steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _ODD
        return _mix(_mix(state) + steps)


def _mix(values: Indices) -> Indices:
    """Apply the splitmix64 finalizer: every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        values = values + _ODD
        values = (values ^ (values >> np.uint64(30))) * _MIX_1
        values = (values ^ (values >> np.uint64(27))) * _MIX_2
        return values ^ (values >> np.uint64(31))
