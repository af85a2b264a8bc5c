"""A server of the page in this process, and plain requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.web.access_guard import AccessGuard
from holdfast.web.http_server import HttpServer, ServerLimits
from holdfast.web.page_api import PageApi
from holdfast.web.served_runs import ServedRoots

DEADLINE_S = 60.0
OWN = {"X-Holdfast": "1"}


@dataclass
class Answer:
    """An answer as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RunningServer:
    """A server on a thread, and its application."""

    port: int
    api: PageApi

    def request(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, dict(headers or {}))
            got = connection.getresponse()
            return Answer(got.status, dict(got.getheaders()), got.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        answer = self.request("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    def run_id(self, name: str) -> str:
        return next(run["id"] for run in self.get("/api/runs")["runs"] if run["name"] == name)

    def job(self, path: str, body: Any) -> Any:
        """Start a job and return its final state."""
        started = self.request("POST", path, body, OWN)
        assert started.status == 200, started.body
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            state = self.get(f"/api/jobs/{started.json['job']}")
            if state["state"] != "running":
                return state
            time.sleep(0.02)
        raise AssertionError("the job has not ended")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def raw(self, data: bytes) -> bytes:
        """Send bytes and return everything that comes until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


@contextmanager
def running(
    *roots: Path | str,
    allow_changes: bool = False,
    guard: AccessGuard | None = None,
    limits: ServerLimits | None = None,
) -> Iterator[RunningServer]:
    """Serve roots on a thread."""
    api = PageApi(ServedRoots([str(root) for root in roots]), allow_changes=allow_changes)
    ports: list[int] = []
    ready = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, HttpServer]] = []

    async def serve() -> None:
        server = HttpServer(api, guard or AccessGuard(on_loopback=True), limits)
        loops.append((asyncio.get_running_loop(), server))

        def started(port: int) -> None:
            ports.append(port)
            ready.set()

        await server.run("127.0.0.1", 0, started)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield RunningServer(ports[0], api)
    finally:
        loop, server = loops[0]
        api.jobs.cancel_all()
        loop.call_soon_threadsafe(server.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
