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
    """Return what `make test` leaves out: tests marked `full`, and cases of tests marked `sliced`."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        sliced = item.get_closest_marker("sliced")
        if item.get_closest_marker("full") or (sliced and seen[test] % sliced.args[0]):
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
