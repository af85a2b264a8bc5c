"""Targets of captures: bytes of the arena, or of a mirror on the device for the arena's small spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from holdfast.adapters.tensors import RAW_DTYPES
from holdfast.plan.writer_job import ArenaSpan


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """The first target of a span's copy: byte `at` of `memory`, which may be a mirror.

    `whole` views the span with the shape of its shard, or is None if the span is only a part of the shard.
    """

    memory: torch.Tensor
    at: int
    whole: torch.Tensor | None
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Mirror:
    """Adjacent small spans of one device: gathered there, one copy moves them to the arena."""

    device: torch.device
    begin: int
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class CopyTargets:
    """The arena of one plan, a target for each of its spans, and the mirrors."""

    arena: torch.Tensor
    targets: tuple[CopyTarget, ...]
    mirrors: tuple[Mirror, ...]

    @staticmethod
    def lay_out(
        arena: torch.Tensor,
        spans: Sequence[tuple[ArenaSpan, torch.device]],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> CopyTargets:
        """Create the targets of spans that are captured from these devices, in arena order.

        Mirrors are allocated on the capturing `stream`, so that their memory is not reused before
        their last copy.
        """
        targets: list[CopyTarget] = []
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
                targets.append(CopyTarget(memory, at, _whole(memory, at, span), mirrored))
        return CopyTargets(arena, tuple(targets), tuple(mirrors))


def _whole(memory: torch.Tensor, at: int, span: ArenaSpan) -> torch.Tensor | None:
    if (span.begin, span.end) != (0, span.held.volume):
        return None
    raw = memory[at : at + span.bytes].view(RAW_DTYPES[span.place.spec.dtype.bytes])
    return raw.view(span.held.sizes)
