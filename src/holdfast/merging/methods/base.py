"""The interface of a merge method: its parameters, a scan of whole tensors if it needs one, and chunks of results.

A method sees flat chunks of the inputs of one output tensor, cast to one dtype. A result of a whole tensor that it
needs (a norm, a threshold) comes from a scan that reads the tensor first. Chunks and ranks must not change a result:
sums over the inputs go in the order of the inputs, and a scan reads a tensor in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.merging.parameter_settings import Scalar

if TYPE_CHECKING:
    import torch

REQUIRED = None
CHUNK_ELEMENTS = 1 << 18  # of one input in memory at a time, on each thread


@dataclass(frozen=True, slots=True)
class MethodParameter:
    """A parameter of a method: for the whole merge, or one for each model. Without a default it is required."""

    name: str
    about: str
    default: Scalar | None = REQUIRED
    per_model: bool = False
    base_too: bool = False  # for each model: the base has one, too


@dataclass(frozen=True, slots=True)
class TensorTask:
    """One output tensor to compute: its key, elements, dtype, the names of its inputs, and the parameters."""

    key: str
    shape: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    names: tuple[str, ...]
    base: int | None
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_input: tuple[Mapping[str, Any], ...] = ()

    @property
    def others(self) -> list[int]:
        """The inputs that are not the base, in order."""
        return [number for number in range(len(self.names)) if number != self.base]


class Draws(Protocol):
    """Random masks for the inputs of output tensors."""

    @property
    def sequential(self) -> bool:
        """True if masks come from one sequence, which a scan must pass in the order of the keys."""

    def begin(self, task: TensorTask, number: int) -> None:
        """Announce that a scan draws the masks of an input from its first element on."""

    def end_scans(self) -> None:
        """Announce that all scans have ended: from now on masks are drawn again."""

    def mask(
        self, task: TensorTask, number: int, start: int, count: int, probability: float | torch.Tensor
    ) -> torch.Tensor:
        """Return for `count` elements from `start` on whether each is kept, with one probability or one for each."""


class ChunkReader(Protocol):
    """The inputs of one output tensor."""

    def read(self, start: int, stop: int, inputs: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return the flat elements [start, stop) of the given inputs, or of all of them, in the task's dtype."""


class MergeMethod:
    """A merge method. The defaults are those of a method that works element by element."""

    name: str
    about: str
    parameters: tuple[MethodParameter, ...] = ()
    needs_base: bool = False
    least: int = 1
    most: int | None = None

    def check(self, task: TensorTask) -> None:
        """Raise InvalidArgument if the parameters of a tensor make no sense."""

    def unit(self, task: TensorTask) -> int:
        """Return how many consecutive elements must be computed together."""
        return 1

    def needs_scan(self, task: TensorTask) -> bool:
        """Return True if `merge` needs the result of a scan of the whole tensor."""
        return False

    def is_random(self, task: TensorTask) -> bool:
        """Return True if `merge` draws random masks."""
        return False

    def scan(self, task: TensorTask, reader: ChunkReader, draws: Draws) -> Any:
        """Read the inputs in order and return what `merge` needs of the whole tensor, as a JSON value."""

    def merge(
        self, task: TensorTask, scanned: Any, start: int, tensors: Sequence[torch.Tensor], draws: Draws
    ) -> torch.Tensor:
        """Return the flat result of the chunk at `start`, in the task's dtype. The inputs must not be written to."""
        raise NotImplementedError


def chunk_ranges(elements: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the ranges of chunks in order; each is a whole number of units."""
    step = -(-CHUNK_ELEMENTS // unit) * unit
    for start in range(0, elements, step):
        yield start, min(elements, start + step)
