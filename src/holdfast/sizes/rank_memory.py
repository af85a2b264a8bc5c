"""The memory of one rank: bytes of parameters, copies, gradients, masters and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.layout.box import Box
from holdfast.layout.placement import Spread
from holdfast.sizes.checkpoint_sizes import RestoreSize
from holdfast.sizes.element_formats import ElementFormat
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.precision import Precision
from holdfast.sizes.run_shape import RunShape
from holdfast.sizes.run_spreads import TensorSpreads

_PARTS = ("parameters", "copies", "gradients", "masters", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank in bytes. `arena_bytes` is page-locked if the rank has a GPU; None: not planned."""

    rank: int
    parameters: int = 0
    copies: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0
    arena_bytes: int | None = None
    restore: RestoreSize

    @property
    def device_bytes(self) -> int:
        """The sum of what lives on the device between steps; activations are not counted."""
        return self.parameters + self.copies + self.gradients + self.masters + self.optimizer

    def figures(self) -> RankMemory:
        """Return the same without the rank, to find ranks that are alike."""
        return replace(self, rank=-1)


class MemoryCounter:
    """Counts the bits of every rank, tensor by tensor. Equal tensors with equal layouts are counted once."""

    def __init__(self, shape: RunShape) -> None:
        self._bits = {part: [0] * shape.world for part in _PARTS}
        self._boxes: dict[tuple[tuple[int, ...], Spread], dict[int, list[Box]]] = {}

    def add(self, tensor: ModelTensor, held: TensorSpreads, precision: Precision, *, is_computed: bool) -> None:
        """Count a tensor on every rank that holds a part of it."""
        self._count("parameters", tensor, held.parameter, precision.parameter(tensor))
        if is_computed and precision.compute is not None and not precision.compute.dtype:
            self._count("copies", tensor, held.parameter, precision.compute)
        self._count("gradients", tensor, held.gradient, precision.gradient(tensor))
        self._count("masters", tensor, held.state, precision.master(tensor))
        for _ in precision.states(tensor).like_parameter:
            self._count("optimizer", tensor, held.state, precision.state(tensor))

    def bytes_of(self, rank: int) -> dict[str, int]:
        """Return the bytes of a rank by their use."""
        return {part: -(-bits[rank] // 8) for part, bits in self._bits.items()}

    def _count(self, part: str, tensor: ModelTensor, spread: Spread, form: ElementFormat | None) -> None:
        if form is None:
            return
        total = self._bits[part]
        for rank, boxes in self._held(tensor.shape, spread).items():
            total[rank] += form.bits_of(boxes, tensor.shape)

    def _held(self, shape: tuple[int, ...], spread: Spread) -> dict[int, list[Box]]:
        if (shape, spread) not in self._boxes:
            found: dict[int, list[Box]] = {}
            for rank, box in spread.boxes(shape):
                found.setdefault(rank, []).append(box)
            self._boxes[shape, spread] = found
        return self._boxes[shape, spread]
