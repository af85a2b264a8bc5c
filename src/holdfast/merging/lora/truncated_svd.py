"""The difference of two weights as the product of two thin matrices, by truncated singular value decomposition."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from holdfast.convert.computed import ReadBox, TensorInputs
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.merging.lora.weight_changes import read_tensor
from holdfast.plan.files import Place, RawArray
from holdfast.plan.recipe import Recipe

_EXACT = 2048  # the largest smaller dim of a matrix that is decomposed whole
_OVERSAMPLES, _ITERATIONS = 32, 8


@dataclass(frozen=True, slots=True)
class ThinFactors:
    """Two matrices whose product approximates a difference, and the relative error in the Frobenius norm."""

    first: torch.Tensor  # A: [rank, in]
    second: torch.Tensor  # B: [out, rank]
    error: float


def thin_factors(difference: torch.Tensor, rank: int) -> ThinFactors:
    """Return the best factors of a rank; for large matrices, nearly the best, by a randomized decomposition."""
    if min(difference.shape) <= max(_EXACT, 4 * rank):
        left, values, right = torch.linalg.svd(difference, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same bytes from the same inputs
            left, values, right_t = torch.svd_lowrank(difference, q=rank + _OVERSAMPLES, niter=_ITERATIONS)
        right = right_t.T
    roots = values[:rank].sqrt()
    first, second = roots[:, None] * right[:rank], left[:, :rank] * roots
    norm = torch.linalg.norm(difference)
    error = torch.linalg.norm(difference - second @ first) / norm if norm > 0 else torch.tensor(0.0)
    return ThinFactors(first.contiguous(), second.contiguous(), float(error))


@dataclass(slots=True, eq=False)
class LayerDifference:
    """A weight before and after training. Its factors are kept until those of another layer are computed."""

    base: Recipe[Place]
    tuned: Recipe[Place]
    rank: int
    is_transposed: bool
    last: list[tuple[LayerDifference, ThinFactors]]  # of all layers, at most one
    errors: list[float] = field(default_factory=list)

    def factors(self, read: ReadBox) -> ThinFactors:
        """Return the factors, and record their error."""
        if self.last and self.last[0][0] is self:
            return self.last[0][1]
        self.last.clear()
        box = Box.full(self.base.shape)
        difference = read_tensor(self.tuned, box, read).float() - read_tensor(self.base, box, read).float()
        found = thin_factors(difference.T if self.is_transposed else difference, self.rank)
        self.errors[:] = [found.error]
        self.last.append((self, found))
        return found


@dataclass(frozen=True, slots=True)
class FactorMatrix:
    """One of the two matrices of a layer."""

    layer: LayerDifference
    is_first: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.layer.base.shape
        outputs, inputs = (columns, rows) if self.layer.is_transposed else (rows, columns)
        return (self.layer.rank, inputs) if self.is_first else (outputs, self.layer.rank)

    @property
    def dtype(self) -> DType:
        return dtype_named("float32")

    @property
    def band_rows(self) -> int:
        return self.shape[0]

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield self.layer.base, Box.full(self.layer.base.shape)
        yield self.layer.tuned, Box.full(self.layer.tuned.shape)

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        found = self.layer.factors(read)
        matrix: RawArray = (found.first if self.is_first else found.second)[begin:end].numpy().view("u4")
        return matrix
