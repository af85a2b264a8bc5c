"""A proxy in front of an object store that does a request wrong: the k-th one, or several from there on."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("500", "503", "409", "lost reply", "reset", "truncated", "drip")
_DRIP_S = 30.0


@dataclass(slots=True)
class Plan:
    """Which requests go wrong: those numbered from `first` on, `count` of them, that fit `applies`."""

    fault: str = ""
    first: int = 0
    count: int = 1
    applies: Callable[[str, str], bool] = lambda method, path: True
    seen: int = 0
    done: list[str] = field(default_factory=list)

    def next(self, method: str, path: str) -> str:
        """The fault of this request, "" for none."""
        if not self.fault or not self.applies(method, path):
            return ""
        self.seen += 1
        if not self.first <= self.seen < self.first + self.count:
            return ""
        self.done.append(f"{method} {path}")
        return self.fault


class Proxy:
    """Passes requests on as they are signed, and does some of them wrong."""

    def __init__(self, port: int) -> None:
        self._lock = threading.Lock()
        self.plan = Plan()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with outer._lock:
                    fault = outer.plan.next(self.command, self.path)
                outer.serve(self, body, fault, port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that went away in the middle."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def set(self, plan: Plan) -> Plan:
        """Take a new plan; the old one is over."""
        with self._lock:
            self.plan = plan
        return plan

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, request: BaseHTTPRequestHandler, body: bytes, fault: str, port: int) -> None:
        if fault in ("500", "503", "409"):
            _answer(request, int(fault), {}, b"<Error><Code>Injected</Code></Error>")
            return
        status, headers, data = _forward(request, body, port)
        if fault == "lost reply":
            _reset(request)
        elif fault in ("reset", "truncated", "drip"):
            _cut(request, status, headers, data, fault)
        else:
            _answer(request, status, headers, data)


def _forward(request: BaseHTTPRequestHandler, body: bytes, port: int) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name.lower() != "connection":
                connection.putheader(name, value)
        connection.endheaders(body or None)
        reply = connection.getresponse()
        data = reply.read()
        headers = {name: value for name, value in reply.getheaders() if name.lower() not in ("connection", "date")}
        return reply.status, headers, data
    except OSError:
        return 503, {}, b"<Error><Code>Unreachable</Code></Error>"
    finally:
        connection.close()


def _head(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], size: int) -> None:
    request.send_response(status)
    for name, value in headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "server"):
            request.send_header(name, value)
    told = headers.get("Content-Length", str(size)) if request.command == "HEAD" else str(size)
    request.send_header("Content-Length", told)
    request.end_headers()


def _answer(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes) -> None:
    _head(request, status, headers, len(data))
    if request.command != "HEAD":
        request.wfile.write(data)


def _cut(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, fault: str) -> None:
    """Send the beginning of a reply, and then end it badly, or hardly go on."""
    if not data or request.command == "HEAD":
        _reset(request)
        return
    _head(request, status, headers, len(data))
    request.wfile.write(data[: len(data) // 2])
    request.wfile.flush()
    if fault == "drip":
        end = time.monotonic() + _DRIP_S
        try:
            for at in range(len(data) // 2, len(data)):
                request.wfile.write(data[at : at + 1])
                request.wfile.flush()
                time.sleep(1)
                if time.monotonic() > end:
                    break
        except OSError:
            pass  # the client has had enough, as it should
    if fault == "reset":
        _reset(request)
    request.close_connection = True


def _reset(request: BaseHTTPRequestHandler) -> None:
    """End the connection at once, as a crashed host does."""
    request.close_connection = True
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()
