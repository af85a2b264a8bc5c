"""Shared by all tests: deadlines, and nothing that hides a failure."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from holdfast.checkpoint.run_identity import run_id
from holdfast.storage.local import LocalStorage
from holdfast.writer.startup_cleanup import clean_arenas

pytest.register_assert_rewrite("holdfast.testing.conformance")

settings.register_profile("holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


# Of each test on many layouts, hosts or faults, `make test` runs the first case and every so-manieth
# after it, or none (0), and nothing marked `full`; `make full` and `--full` run all of them.
SLICED = {
    "dist/test_background.py": 3,
    "dist/test_bad_input.py": 3,
    "dist/test_crashes.py": 3,
    "dist/test_dcp.py": 3,
    "dist/test_hosts.py": 4,
    "dist/test_layouts.py": 3,
    "dist/test_mapping.py": 3,
    "dist/test_reading.py": 3,
    "dist/test_resume_elsewhere.py": 0,  # five layouts in a chain
    "dist/test_resume_exactly.py": 9,
    "dist/test_stacked.py": 2,
    "dist/test_train_checkpoints.py": 12,
    "dist/test_train_dropout.py": 20,
    "dist/test_train_evaluation.py": 0,
    "dist/test_train_gradients.py": 12,
    "dist/test_train_options.py": 4,
    "dist/test_train_sizes.py": 9,
    "dist/test_train_start.py": 0,  # transformers' folders of five families
    "objects/test_faults.py": 3,
    "objects/test_runs.py": 2,
}
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case of every test, not a slice of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.args == config.getini("testpaths"):
        _check_all_are_collected(items)
    if not config.getoption("--full"):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _check_all_are_collected(items: list[pytest.Item]) -> None:
    """A folder whose name pytest passes over would take its tests with it, without a word."""
    missing = set(TESTS.rglob("test_*.py")) - {item.path for item in items}
    if missing:
        raise pytest.UsageError(f"not collected: {', '.join(sorted(str(path.relative_to(TESTS)) for path in missing))}")


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        every = SLICED.get(item.path.relative_to(TESTS).as_posix(), 1)
        test = item.nodeid.partition("[")[0]
        if not every or seen[test] % every or item.get_closest_marker("full"):
            left_out.append(item)
        seen[test] += 1
    return left_out


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_HOST", "HOLDFAST_TRUST_OWNERS", "SUDO_UID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """A state that a test made impossible to write stays in memory, as it should; here nobody comes for it."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    roots = [folder, *(path for path in folder.glob("*") if path.is_dir())] if folder else []
    for root in roots:
        clean_arenas(run_id(LocalStorage(root)))
