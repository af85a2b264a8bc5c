"""Sample roots and a server of them, shared by the tests that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.web import sample_runs
from tests.web.running import RunningServer, running


@pytest.fixture(scope="package")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample roots that take no time to make."""
    folder = tmp_path_factory.mktemp("samples")
    sample_runs.branches(folder / "branches")
    sample_runs.damaged(folder / "damaged")
    sample_runs.hostile(folder / "hostile")
    sample_runs.light_steps(folder / "light", range(10, 310, 10))
    return folder


@pytest.fixture(scope="package")
def server(samples: Path) -> Iterator[RunningServer]:
    """A server of the sample roots."""
    with running(samples) as made:
        yield made
