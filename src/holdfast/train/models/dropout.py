"""Dropout as a pure function of what is dropped: the sample, the place in the model, the position, the feature.

No generator is drawn from. Every number is a hash of its own coordinates, computed by tensor
operations, so that a rank finds its part of a mask without the rest of it: the mask is the same
on every layout, after every resume, and when a block is computed again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_WORD = 64
_HALF = 32
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # the multipliers of splitmix64, as int64
_COLUMN, _LAST = -0x61C88647, -0x7A143589  # odd, with bits all over, as int32


@dataclass(frozen=True, slots=True)
class Grid:
    """What the numbers of [..., rows, columns] are drawn by: a random word for each row, and one for each column."""

    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """All that one forward pass draws: over (sample, position, feature) and (sample, head, query, key).

    A grid that no dropout needs is None.
    """

    features: Grid | None = None
    attention: Grid | None = None


NOTHING = Draws()


@dataclass(frozen=True, slots=True)
class Dropout:
    """One place of the model where a share of the numbers becomes zero, and the others grow to make up for it."""

    rate: float
    place: str

    def __call__(self, x: torch.Tensor, grid: Grid | None) -> torch.Tensor:
        """Without a grid, as in evaluation, nothing is dropped."""
        if grid is None or not self.rate:
            return x
        return x.masked_fill(dropped(grid, self.rate, self.place), 0.0) * (1.0 / (1.0 - self.rate))


def sample_keys(seed: int, step: int, first: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """What the samples numbered [first, first + count) of a run draw by at one step: [count], int64."""
    samples = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return _mixed(samples + _word(f"{seed}/{step}"))


def feature_grid(keys: torch.Tensor, first: int, length: int, features: int) -> Grid:
    """The grid of [batch, length, features], for the positions from `first` on."""
    positions = torch.arange(first, first + length, dtype=torch.int64, device=keys.device)
    return Grid(_mixed(keys[:, None] + positions), _columns(features, keys.device))


def attention_grid(keys: torch.Tensor, first: int, heads: int, length: int) -> Grid:
    """The grid of [batch, heads, length, length], for the heads from `first` on."""
    numbers = torch.arange(first + 1, first + heads + 1, dtype=torch.int64, device=keys.device) << _HALF
    queries = torch.arange(length, dtype=torch.int64, device=keys.device)
    return Grid(_mixed(keys[:, None, None] + (numbers[:, None] + queries)), _columns(length, keys.device))


def dropped(grid: Grid, rate: float, place: str) -> torch.Tensor:
    """Which of the numbers [..., rows, columns] become zero."""
    words = (grid.rows ^ _word(place)) * _FIRST
    words = (words ^ _shifted(words, _HALF)) * _SECOND
    low, high = words.to(torch.int32)[..., None], (words >> _HALF).to(torch.int32)[..., None]
    bits = (low ^ grid.columns).mul_(high | 1)
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _LAST
    limit = min(round(rate * 2**_HALF), 2**_HALF - 1) - 2 ** (_HALF - 1)
    return torch.lt(bits, limit)


def _columns(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device) * _COLUMN


def _word(text: str) -> int:
    """A random word as int64 has it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_WORD // 8).digest(), "little", signed=True)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Numbers that have nothing to do with each other, from numbers that may follow each other: splitmix64's end."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros coming in: torch shifts the sign in."""
    return (x >> by) & ((1 << (_WORD - by)) - 1)
