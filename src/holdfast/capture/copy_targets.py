"""Where captures go: spots in the arena, or on the device in a mirror of the arena's small spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from holdfast.adapters.tensors import RAW_DTYPES
from holdfast.plan.writer_job import ArenaSpan


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a span is copied to first: byte `at` of `memory`, which may be a mirror.

    `whole` is the span as the shard that it holds, None if it holds only some of it.
    """

    memory: torch.Tensor
    at: int
    whole: torch.Tensor | None
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Mirror:
    """Small spans of one device side by side: gathered there, they cross to the arena in one copy."""

    device: torch.device
    begin: int
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Spots:
    """The arena of one plan, a spot for each of its spans, and the mirrors."""

    arena: torch.Tensor
    spots: tuple[Spot, ...]
    mirrors: tuple[Mirror, ...]

    @staticmethod
    def lay_out(
        arena: torch.Tensor,
        spans: Sequence[tuple[ArenaSpan, torch.device]],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> Spots:
        """Spots for spans that are captured from these devices, in the order of the arena.

        Mirrors belong to the `stream` that captures, so that their memory is not given to
        another before its last copy.
        """
        spots: list[Spot] = []
        mirrors: list[Mirror] = []
        for (small, device), run in groupby(spans, key=lambda pair: (pair[0].is_small, pair[1])):
            members = [span for span, _ in run]
            begin, end = members[0].offset, members[-1].offset + members[-1].bytes
            mirrored = small and device.type == "cuda" and len(members) > 1
            if mirrored:
                with torch.cuda.stream(stream(device)):
                    mirrors.append(Mirror(device, begin, torch.empty(end - begin, dtype=torch.uint8, device=device)))
            for span in members:
                memory, at = (mirrors[-1].memory, span.offset - begin) if mirrored else (arena, span.offset)
                spots.append(Spot(memory, at, _whole(memory, at, span), mirrored))
        return Spots(arena, tuple(spots), tuple(mirrors))


def _whole(memory: torch.Tensor, at: int, span: ArenaSpan) -> torch.Tensor | None:
    if (span.begin, span.end) != (0, span.held.volume):
        return None
    raw = memory[at : at + span.bytes].view(RAW_DTYPES[span.place.spec.dtype.bytes])
    return raw.view(span.held.sizes)
