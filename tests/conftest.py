"""Shared by all tests: deadlines, and nothing that hides a failure."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from holdfast.persist.start import clean_arenas, run_id
from holdfast.storage.local import LocalStorage

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))  # `tests.faults`, as `make faults` runs it
pytest.register_assert_rewrite("holdfast.testing.conformance")

settings.register_profile("holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


# Every layout of the trainer takes minutes: `make test` runs one in so many, `make layouts` all of them.
SLICED = {
    "test_train_gradients.py": 7,
    "test_train_checkpoints.py": 8,
    "test_train_options.py": 4,
    "test_resume_exactly.py": 4,
    "test_resume_elsewhere.py": 0,  # five layouts in a chain
    "test_train_evaluation.py": 0,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every layout and way to shard, not a slice of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    for name, every in SLICED.items():
        own = [item for item in items if item.path.name == name]
        left_out += [item for number, item in enumerate(own) if not every or number % every]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_HOST", raising=False)


@pytest.fixture(autouse=True)
def _memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """A state that a test made impossible to write stays in memory, as it should; here nobody comes for it."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    roots = [folder, *(path for path in folder.glob("*") if path.is_dir())] if folder else []
    for root in roots:
        clean_arenas(run_id(LocalStorage(root)))
