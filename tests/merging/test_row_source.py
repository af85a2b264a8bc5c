import numpy as np
import pytest
import torch

from holdfast.format.dtypes import dtype_named
from holdfast.merging.row_source import GatheredRows, RowOrigins


class Rows:
    """A tensor in memory as a source."""

    dtype = dtype_named("float32")

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.reads = 0

    def places(self, model):
        return []

    def read(self, files, start, stop, buffer=None):
        self.reads += 1
        return self.tensor.flatten()[start:stop].clone()


ORIGINS = RowOrigins(
    np.array([0, 0, 0, 1, -1, 0]), np.array([0, 1, 2, 7, 0, 5]), {2: ((0, 0), (1, 0)), 5: ((0, 5), (1, 1))}
)


@pytest.fixture
def gathered():
    a, b = torch.randn(8, 3), torch.randn(8, 3)
    expected = torch.stack([a[0], a[1], (a[0] + b[0]) / 2, b[7], torch.zeros(3), (a[5] + b[1]) / 2])
    sources = Rows(a), Rows(b)
    return GatheredRows((6, 3), dtype_named("float32"), sources, ORIGINS), expected, sources


def test_rows_come_from_their_origins(gathered):
    source, expected, _ = gathered
    assert torch.allclose(source.read([], 0, 18).reshape(6, 3), expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (2, 7), (4, 5), (8, 18), (10, 11)])
def test_any_range_is_that_of_the_whole(gathered, start, stop):
    source, expected, _ = gathered
    assert torch.allclose(source.read([], start, stop), expected.flatten()[start:stop])


def test_consecutive_rows_are_read_together():
    origins = RowOrigins(np.zeros(100, np.int64), np.arange(100), {})
    rows = Rows(torch.randn(100, 2))
    found = GatheredRows((100, 2), dtype_named("float32"), (rows,), origins).read([], 0, 200)
    assert torch.equal(found.reshape(100, 2), rows.tensor) and rows.reads == 1
