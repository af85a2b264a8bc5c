"""The largest elements of a delta: a threshold found by counting bit patterns, equal magnitudes taken by position.

Magnitudes order like their bits. 15 bits of bfloat16 and float16 are counted in one pass over the tensor; wider
floats, compared as float32, need a second pass for the lower bits. No pass keeps more than a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_SEGMENTS = 16
_HIGH, _LOW = 1 << 15, 1 << 16

Deltas = Callable[[int, int], torch.Tensor]  # a delta's flat elements [start, stop)


@dataclass(frozen=True, slots=True)
class LargestElements:
    """The largest elements: those with larger bits than the threshold, and those equal to it before a position."""

    threshold: int
    before: int

    def mask(self, delta: torch.Tensor, start: int) -> torch.Tensor:
        """Return which elements of a chunk at `start` are among the largest."""
        bits = magnitude_bits(delta)
        kept = bits > self.threshold
        if start < self.before:
            equal = bits == self.threshold
            if self.before < start + len(delta):
                equal[self.before - start :] = False
            kept |= equal
        return kept


def magnitude_bits(delta: torch.Tensor) -> torch.Tensor:
    """Return the bits of the magnitudes as integers of the same order."""
    if delta.element_size() == 2:
        return delta.view(torch.int16) & 0x7FFF
    return delta.float().view(torch.int32) & 0x7FFFFFFF


def largest_elements(delta: Deltas, count: int, chunks: Sequence[tuple[int, int]]) -> LargestElements:
    """Return the `count` largest elements of a delta. It is read chunk by chunk, two or three times."""
    segments = [list(part) for part in np.array_split(np.array(chunks), min(_SEGMENTS, len(chunks)))]
    two_bytes = delta(*chunks[0]).element_size() == 2
    if two_bytes:
        histograms = _histograms(delta, segments, lambda bits: bits, _HIGH)
        threshold, left = _threshold(histograms.sum(axis=0), count)
        equal = histograms[:, threshold]
    else:
        high, left = _threshold(_histograms(delta, [chunks], lambda bits: bits >> 16, _HIGH)[0], count)
        lower = _histograms(delta, segments, lambda bits: bits[(bits >> 16) == high] & 0xFFFF, _LOW)
        low, left = _threshold(lower.sum(axis=0), left)
        threshold, equal = high << 16 | low, lower[:, low]
    return LargestElements(threshold, _position(delta, segments, equal, threshold, left))


def _histograms(
    delta: Deltas, segments: Sequence[Sequence[Sequence[int]]], digit: Callable[[torch.Tensor], torch.Tensor], size: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return how often each digit occurs in each segment."""
    out = np.zeros((len(segments), size), np.int64)
    for number, segment in enumerate(segments):
        for start, stop in segment:
            found = digit(magnitude_bits(delta(int(start), int(stop))))
            out[number] += torch.bincount(found, minlength=size).numpy()
    return out


def _threshold(histogram: np.ndarray[tuple[int], np.dtype[np.int64]], count: int) -> tuple[int, int]:
    """Return the smallest digit of the `count` largest elements, and how many elements with it are among them."""
    from_above = np.cumsum(histogram[::-1])
    place = int(np.searchsorted(from_above, count))
    above = int(from_above[place - 1]) if place else 0
    return len(histogram) - 1 - place, count - above


def _position(
    delta: Deltas,
    segments: Sequence[Sequence[Sequence[int]]],
    equal: np.ndarray[tuple[int], np.dtype[np.int64]],
    threshold: int,
    left: int,
) -> int:
    """Return the position after the last of the `left` first elements that are equal to the threshold."""
    for segment, count in zip(segments, equal.tolist(), strict=True):
        if left > count:
            left -= count
            continue
        for start, stop in segment:
            places = (magnitude_bits(delta(int(start), int(stop))) == threshold).nonzero().flatten()
            if left <= len(places):
                return int(start) + int(places[left - 1]) + 1
            left -= len(places)
    raise AssertionError("the counted elements are not there: a file changed while it was read")
