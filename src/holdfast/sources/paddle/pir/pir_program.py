"""A Paddle program as frozen plain data: operators in order, their attributes, the types of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

UNKNOWN = -1  # the size of a dim that may differ between calls
NO_VALUE = 0  # the number of an optional input that is not given


@dataclass(frozen=True, slots=True)
class PirTensor:
    """The dtype and shape of a tensor; -1 for sizes that may differ between calls."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A type that is not a dense tensor, such as an array of tensors, by its name in the file."""

    name: str


PirType = PirTensor | OpaqueType | tuple["PirType", ...] | None


@dataclass(frozen=True, slots=True)
class OpaqueAttribute:
    """An attribute that Holdfast does not read, by the name of its kind."""

    kind: str


Attribute = bool | int | float | complex | str | OpaqueAttribute | tuple["Attribute", ...]


@dataclass(frozen=True, slots=True)
class PirResult:
    """A value that an operator computes, by the number that its users refer to."""

    id: int
    type: PirType


@dataclass(frozen=True, slots=True)
class PirOperator:
    """One operator: its name such as "pd_op.matmul", the numbers of its inputs, its results and attributes.

    `inner` are the operators of its regions: the branches of an if, the body of a loop.
    """

    name: str
    inputs: tuple[int, ...]
    results: tuple[PirResult, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    inner: tuple[PirOperator, ...] = ()
    regions: int = 0


@dataclass(frozen=True, slots=True)
class PirParameter:
    """A weight: its name, which is its key in `.pdiparams`, and the number that its users refer to."""

    key: str
    id: int
    type: PirType
    trainable: bool


@dataclass(frozen=True, slots=True)
class PirProgram:
    """A program as `paddle.jit.save` writes it. It says what to compute and computes nothing."""

    version: int
    trainable: bool
    parameters: tuple[PirParameter, ...]
    operators: tuple[PirOperator, ...]

    def walk(self) -> Iterator[PirOperator]:
        """Yield every operator, those of regions after the operator that has them."""
        yield from _walk(self.operators)

    def counts(self) -> dict[str, int]:
        """Return how often each operator is used, most often first."""
        return dict(Counter(operator.name for operator in self.walk()).most_common())


def _walk(operators: tuple[PirOperator, ...]) -> Iterator[PirOperator]:
    for operator in operators:
        yield operator
        yield from _walk(operator.inner)
