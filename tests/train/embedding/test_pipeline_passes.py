"""How many micro batches go through a pipeline at once."""

from __future__ import annotations

import pytest

from holdfast.train.embedding.pipeline_passes import RUN, run_size
from holdfast.train.layout import Layout

PP = Layout(pp=4)
INTERLEAVED = Layout(pp=2, schedule="interleaved", stages_per_rank=2)


@pytest.mark.parametrize("layout", [PP, INTERLEAVED], ids=str)
def test_runs_are_equal_and_their_size_does_not_grow_with_the_batch(layout):
    for count in range(1, 20 * RUN):
        size = run_size(layout, count)
        runs = -(-count // size)
        assert layout.takes(size)
        assert size <= RUN * layout.pp + layout.pp
        assert runs * size - count < max(layout.stages, runs * layout.pp)


def test_few_micro_batches_run_at_once():
    assert [run_size(PP, count) for count in (1, 4, 5, 32, 33, 64)] == [4, 4, 5, 32, 17, 32]
