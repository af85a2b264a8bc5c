"""Shared by all tests: deadlines, and nothing that hides a failure."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_HOST", raising=False)
