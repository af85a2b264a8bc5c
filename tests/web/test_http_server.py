"""A server under attack stays up, within fixed memory and threads, and leaks nothing: slow, greedy and rude clients."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.web.http_server import ServerLimits
from tests.web import sample_runs
from tests.web.running import OWN, read_all, running

QUICK = ServerLimits(connections=64, streams=4, idle_s=2.0, head_s=1.0, body_s=1.0, write_s=1.0)


@pytest.fixture(scope="module")
def quick(samples):
    """A server whose patience ends soon."""
    with running(samples, limits=QUICK) as made:
        yield made


def is_up(server):
    return server.request("GET", "/api/about").status == 200


def test_every_answer_has_the_security_headers(server):
    for path in ("/", "/api/runs", "/nothing", "/api/nothing", "/static/app.js"):
        headers = server.request("GET", path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Server" not in headers


def test_other_hosts_are_not_answered(server):
    answer = server.request("GET", "/api/runs", headers={"Host": "evil.example"})
    assert (answer.status, "runs" in answer.json) == (421, False)


def test_head_has_no_body_and_other_methods_nothing(server):
    assert server.request("HEAD", "/api/runs").body == b""
    for method in ("OPTIONS", "PUT", "PATCH", "TRACE", "FOO"):
        answer = server.request(method, "/api/runs")
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, POST, DELETE")


def test_a_post_of_another_site_runs_nothing(server):
    answer = server.request("POST", "/api/compare", b"a=b", {"Content-Type": "text/plain"})
    assert answer.status == 403
    assert not server.api.jobs._jobs or all(job.text != "compare" for job in server.api.jobs._jobs.values())


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 4\r\nContent-Length: 40\r\n\r\nGET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /api/runs HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_a_smuggled_request_is_not_answered(server, rest):
    found = server.raw(b"POST /api/compare HTTP/1.1\r\nHost: localhost\r\nX-Holdfast: 1\r\n" + rest)
    assert found.count(b"HTTP/1.1 ") == 1
    assert found.split()[1] in (b"400", b"501")


def test_requests_in_one_packet_are_answered_in_order(server):
    one = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert server.raw(one * 3 + last).count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 10_000_000, b"431"),
        (b"G" * 1_000_000, b"431"),
        (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"414"),
        (
            b"POST /api/compare HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 9_000_000,
            b"413",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200) + b"\r\n\r\n", b"400"),
        (os.urandom(1000) + b"\r\n\r\n", b"400"),
    ],
)
def test_huge_and_senseless_requests_are_cut_off(quick, data, status):
    with quick.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        found = read_all(connection)
    # Of megabytes that are still on their way, a system may destroy the answer with the connection.
    assert (found == b"" and len(data) > 2_000_000) or found.split()[1] == status
    assert is_up(quick)


def test_a_body_that_is_too_deep_or_no_object_is_refused(server):
    for body in (b"[" * 30_000, b"[]", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b'{"run":' + b"[" * 60_000):
        answer = server.request("POST", "/api/compare", body, OWN)
        assert answer.status in (400, 422), body[:20]


def test_slow_clients_are_cut_off_and_others_served(quick):
    """One sends a byte, one never the end of its head, one not its body: each costs a connection for a moment."""
    slow = [quick.connect() for _ in range(30)]
    for number, connection in enumerate(slow):
        begun = (
            b"G",
            b"GET / HTTP/1.1\r\nHost: local",
            b"POST /api/compare HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        )
        connection.sendall(begun[number % 3])
    assert is_up(quick)
    began = time.monotonic()
    answers = [read_all(connection) for connection in slow]
    assert time.monotonic() - began < 20
    assert all(b"408" in answer or answer == b"" for answer in answers)
    assert sum(b"408" in answer for answer in answers) >= 20
    for connection in slow:
        connection.close()


def test_connections_that_say_nothing_make_room(quick):
    """More connections than there may be: the oldest idle ones go, and a new one is served."""
    silent = [quick.connect() for _ in range(100)]
    assert is_up(quick)
    for connection in silent:
        connection.close()


def test_two_hundred_clients_at_once_are_served(server):
    results: list[int] = []
    barrier = threading.Barrier(200)
    run = server.run_id("light")

    def ask():
        barrier.wait(30)
        results.append(server.request("GET", f"/api/runs/{run}").status)

    threads = [threading.Thread(target=ask) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [200] * 200


def test_pages_beyond_the_limit_of_streams_are_refused(quick):
    path = f"/api/runs/{quick.run_id('light')}/stream".encode()
    held = []
    for _ in range(QUICK.streams):
        connection = quick.connect()
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(4096)
        held.append(connection)
    assert b" 503 " in quick.raw(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 20
    while b" 503 " in (answer := _first_of(quick, path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b" 200 " in answer


def _first_of(server, path):
    with server.connect() as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(4096)


def test_answers_that_nobody_reads_are_counted(tmp_path):
    """Two clients that do not read fill the budget: a third is told to come again, small answers are not held up."""
    state = {"note": {"kind": "json", "value": {str(n): [["a" * 2000] * 3] * 60 for n in range(10)}}}
    sample_runs.write_step(tmp_path, 1, {"model": sample_runs.model_arrays(0)}, state=state)
    limits = ServerLimits(unsent_bytes=500_000, write_s=2.0, slowest_bytes_s=20_000)
    with running(tmp_path, limits=limits) as server:
        run = server.get("/api/runs")["runs"][0]["id"]
        path = f"/api/runs/{run}/steps/step-000000000001"
        size = len(server.request("GET", path).body)
        assert limits.unsent_bytes / 2 < size < limits.unsent_bytes
        with socket.socket() as greedy:
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.connect(("127.0.0.1", server.port))
            greedy.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(1.0)
            answer = server.request("GET", path)
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert is_up(server)
        deadline = time.monotonic() + 30
        while server.request("GET", path).status == 503 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.request("GET", path).status == 200


def test_a_refused_client_gets_the_answer_and_an_orderly_end(quick):
    """What it still sends is discarded: to close at once would reset the connection, which browsers show instead."""
    with quick.connect() as connection:
        connection.sendall(b"GET /\r\n\r\n" + b"x" * 500_000)
        found = b""
        while part := connection.recv(65536):  # a reset raises
            found += part
    assert found.split()[1] == b"400"


SERVE = """
import sys
from holdfast.cli.main import main
sys.argv = ["holdfast", "serve", *sys.argv[1:]]
main()
"""


@contextlib.contextmanager
def process_of(root):
    """`holdfast serve` as a process; yields its port and a function that returns its memory in MB and threads."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(root)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        line = process.stdout.readline().decode()
        port = int(line.rpartition(":")[2].strip("/\n "))

        def facts():
            status = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
                if ":" in line
            )
            return int(status["VmHWM"].split()[0]) / 1024, int(status["Threads"])

        yield port, facts
        assert process.poll() is None, "the server ended"
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_clients_that_never_read_take_neither_memory_nor_threads(tmp_path):
    """200 clients ask for a large answer again and again and read nothing, while another is served."""
    values = {str(number): [["a" * 2000] * 3] * 60 for number in range(60)}
    state = {"note": {"kind": "json", "value": values}}
    sample_runs.write_step(tmp_path, 1, {"model": sample_runs.model_arrays(0)}, state=state)
    with process_of(tmp_path) as (port, facts):
        run = ask(port, "/api/runs")["runs"][0]["id"]
        path = f"/api/runs/{run}/steps/step-000000000001"
        size = len(json.dumps(ask(port, path)))
        assert 200 * size > ServerLimits().unsent_bytes
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        before, _ = facts()
        greedy = []
        for _ in range(200):
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request * 20)
            greedy.append(connection)
        for _ in range(5):
            assert ask(port, "/api/about")["version"]
            time.sleep(0.2)
        memory, threads = facts()
        for connection in greedy:
            connection.close()
        assert ask(port, path)["step"] == 1
    assert threads < 16
    assert memory < 200, f"{before:.0f} MB before, {memory:.0f} MB with 200 clients"


def ask(port, path):
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body[:200]
    return json.loads(body)
