"""Dropout as a pure function of sample, place in the model, position and feature.

No generator is used. Every random number is a hash of its coordinates, computed by tensor operations,
so that a rank computes only its part of a mask. The mask is the same on every layout, after every
resume, and when a block is recomputed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_WORD = 64
_HALF = 32
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # the multipliers of splitmix64, as int64
_COLUMN, _LAST = -0x61C88647, -0x7A143589  # odd multipliers with well-spread bits, as int32


@dataclass(frozen=True, slots=True)
class Grid:
    """The seeds of the random numbers of [..., rows, columns]: a random word per row and per column."""

    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True, slots=True)
class DropoutGrids:
    """The grids of one forward pass: over (sample, position, feature) and (sample, head, query, key).

    A grid that no dropout needs is None.
    """

    features: Grid | None = None
    attention: Grid | None = None


NO_DROPOUT = DropoutGrids()


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout at one place of the model."""

    rate: float
    place: str

    def __call__(self, x: torch.Tensor, grid: Grid | None) -> torch.Tensor:
        """Apply dropout; without a grid, as in evaluation, return the input."""
        if grid is None or not self.rate:
            return x
        return x.masked_fill(dropout_mask(grid, self.rate, self.place), 0.0) * (1.0 / (1.0 - self.rate))


def sample_keys(seed: int, step: int, first: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the dropout keys of samples [first, first + count) of a run at one step: [count], int64."""
    samples = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return _mix(samples + _word(f"{seed}/{step}"))


def feature_grid(keys: torch.Tensor, first: int, length: int, features: int) -> Grid:
    """Return the grid of [batch, length, features], for positions starting at `first`."""
    positions = torch.arange(first, first + length, dtype=torch.int64, device=keys.device)
    return Grid(_mix(keys[:, None] + positions), _columns(features, keys.device))


def attention_grid(keys: torch.Tensor, first: int, heads: int, length: int) -> Grid:
    """Return the grid of [batch, heads, length, length], for heads starting at `first`."""
    numbers = torch.arange(first + 1, first + heads + 1, dtype=torch.int64, device=keys.device) << _HALF
    queries = torch.arange(length, dtype=torch.int64, device=keys.device)
    return Grid(_mix(keys[:, None, None] + (numbers[:, None] + queries)), _columns(length, keys.device))


def dropout_mask(grid: Grid, rate: float, place: str) -> torch.Tensor:
    """Return the mask of the elements of [..., rows, columns] that become zero."""
    words = (grid.rows ^ _word(place)) * _FIRST
    words = (words ^ _shift_right(words, _HALF)) * _SECOND
    low, high = words.to(torch.int32)[..., None], (words >> _HALF).to(torch.int32)[..., None]
    bits = (low ^ grid.columns).mul_(high | 1)
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _LAST
    limit = min(round(rate * 2**_HALF), 2**_HALF - 1) - 2 ** (_HALF - 1)
    return torch.lt(bits, limit)


def _columns(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device) * _COLUMN


def _word(text: str) -> int:
    """Hash a string to a random int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_WORD // 8).digest(), "little", signed=True)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the splitmix64 finalizer, which maps consecutive integers to independent-looking ones."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right logically: torch's own shift copies the sign bit."""
    return (x >> by) & ((1 << (_WORD - by)) - 1)
