"""`holdfast serve`: its address, its token, its end, its errors; and it never imports torch."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from holdfast.cli.serve import page_address
from tests.cli.calls import call, process
from tests.web import sample_runs

PROGRAM = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
from holdfast.cli.main import main
sys.argv = ["holdfast", "serve", *sys.argv[1:]]
main()
"""


@contextmanager
def serving(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_address_serves_and_ends_quietly(tmp_path, number):
    sample_runs.branches(tmp_path)
    with serving(tmp_path) as (process, address):
        port = int(address.rpartition(":")[2].rstrip("/"))
        assert address == f"http://127.0.0.1:{port}/"
        run = json.loads(get(port, "/api/runs")[2])["runs"][0]["id"]
        for path in ("/", f"/api/runs/{run}", f"/api/runs/{run}/steps/step-000000000045/layout?mesh=dp:2"):
            assert get(port, path)[0] == 200
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert errors.splitlines() == ["holdfast: Ctrl-C ends it", "False"]  # torch was not imported


def test_other_machines_need_the_token(tmp_path):
    sample_runs.light_steps(tmp_path, [1])
    with serving(tmp_path, "--host", "0.0.0.0") as (_, address):
        port, token = int(address.split(":")[2].split("/")[0]), address.rpartition("=")[2]
        assert address == f"http://127.0.0.1:{port}/?token={token}"
        assert len(token) >= 32
        assert get(port, "/api/runs")[0] == 401
        assert get(port, "/?token=wrong")[0] == 401
        status, headers, _ = get(port, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert get(port, "/api/runs", Cookie=cookie)[0] == 200
        assert get(port, "/api/runs", Cookie=cookie, Host=f"{socket.gethostname()}:{port}")[0] == 200
        assert get(port, "/api/runs", Cookie=cookie, Host="evil.example")[0] == 421


def test_a_port_in_use_and_a_missing_root_are_clear_errors(tmp_path):
    sample_runs.light_steps(tmp_path, [1])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = process("serve", tmp_path, "--port", taken.getsockname()[1])
    assert (done.returncode, "choose another --port" in done.stderr) == (2, True)
    missing = process("serve", tmp_path / "nothing")
    assert (missing.returncode, "no such file or folder" in missing.stderr) == (2, True)
    address = process("serve", tmp_path, "--host", "no.such.host.invalid")
    assert (address.returncode, "cannot listen on no.such.host.invalid" in address.stderr) == (2, True)
    assert not any("Traceback" in one.stderr for one in (done, missing, address))
    assert "ROOT" in call("serve").output


def test_addresses_that_a_browser_can_open():
    assert page_address("::1", 80, None) == "http://[::1]:80/"
    assert page_address("::", 80, "a") == "http://[::1]:80/?token=a"
    assert page_address("gpu7", 80, None) == "http://gpu7:80/"


def test_the_help_teaches():
    text = call("serve", "--help").output
    assert "ssh -L" in text
    assert "--allow-changes" in text
