"""A small HTTP server on asyncio whose memory and threads are bounded, whatever its clients do.

One thread speaks with all clients, so a client that sends or reads slowly costs a connection and no thread.
Everything has a limit: connections, the time and size of a request, the bytes of answers that wait for
their readers, the time in which a client must read an answer, and streams of events. See docs/adr/0025.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.core.errors import HoldfastError
from holdfast.core.limits import KIB, MIB
from holdfast.web.access_guard import METHODS, AccessGuard
from holdfast.web.http_request import HEAD_BYTES, BadRequest, HttpRequest, parse_head
from holdfast.web.http_response import HttpResponse, encode_head
from holdfast.web.page_workers import PageWorkers

_CHUNK_BYTES = 64 * KIB
_SMALL_BYTES = 64 * KIB  # an answer that needs no share of the budget
_SOCKET_BYTES = 128 * KIB
_LINGER_S, _LINGER_READS = 1.0, 64


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server. A client that reads less than `slowest_bytes_s` is cut off."""

    connections: int = 256
    streams: int = 64
    idle_s: float = 60.0
    head_s: float = 10.0
    body_s: float = 10.0
    write_s: float = 10.0
    slowest_bytes_s: int = 32 * KIB
    unsent_bytes: int = 64 * MIB
    answer_bytes: int = 32 * MIB
    workers: int = 4


class PageApplication(Protocol):
    """The application that a server serves."""

    def at_once(self, request: HttpRequest) -> HttpResponse | None:
        """Answer without waiting, on the event loop; None if that needs a worker."""

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer on a worker thread."""

    def stream(self, request: HttpRequest, workers: PageWorkers) -> AsyncIterator[bytes] | None:
        """Return the stream of events that a request asks for, None if it asks for something else."""


class _Connection:
    """An open connection: whether it waits for a request, and so may be closed in favor of another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.waits = True

    def abort(self) -> None:
        self.writer.transport.abort()


class HttpServer:
    """Serves an application on a host and port until `stop` is called, from the thread of the event loop."""

    def __init__(self, application: PageApplication, guard: AccessGuard, limits: ServerLimits | None = None) -> None:
        self._application = application
        self._guard = guard
        self._limits = limits or ServerLimits()
        self._workers = PageWorkers(self._limits.workers)
        self._stream_workers = PageWorkers(self._limits.workers)  # events of a slow storage hold up no answer
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._streams = 0
        self._unsent = 0
        self._stopped = asyncio.Event()

    async def run(self, host: str, port: int, started: Callable[[int], None]) -> None:
        """Serve; `started` is called with the port once connections are accepted."""
        self._sent = asyncio.Condition()
        self._working = asyncio.Semaphore(self._limits.workers)
        server = await asyncio.start_server(
            self._serve, host, port, limit=HEAD_BYTES, backlog=512, reuse_address=True, start_serving=True
        )
        async with server:
            started(server.sockets[0].getsockname()[1])
            await self._stopped.wait()
            server.close()
            for connection in list(self._connections):
                connection.abort()

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer)
        if not self._admit(connection):
            return
        try:
            while await self._exchange(connection):
                pass
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone or too slow, or the server stops: nothing is left to tell it
        finally:
            self._connections.pop(connection, None)
            connection.abort()

    def _admit(self, connection: _Connection) -> bool:
        """Take a connection in; a full server closes the oldest one that waits, or else the new one."""
        if len(self._connections) >= self._limits.connections:
            oldest = next((other for other in self._connections if other.waits), None)
            if oldest is None:
                connection.abort()
                return False
            del self._connections[oldest]
            oldest.abort()
        self._connections[connection] = None
        transport = connection.writer.transport
        transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        return True

    async def _exchange(self, connection: _Connection) -> bool:
        """Read one request and answer it; return True if another may follow on the connection."""
        request: HttpRequest | None = None
        try:
            request = await self._read(connection)
            if request is None:
                return False
            connection.waits = False
            refused = self._guard.check(request)
            if refused is None and (events := self._open_stream(request)) is not None:
                await self._send_events(connection, events)
                return False
            response = refused or await self._answer(request)
        except BadRequest as error:
            allow = {"Allow": ", ".join(METHODS)} if error.status == 405 else {}
            response = HttpResponse.problem(error.status, "BadRequest", str(error), allow)
            request = replace(request, keeps_open=False) if request is not None else None
        await self._send(connection, request, response)
        connection.waits = True
        if request is None or not request.keeps_open:
            await _linger(connection)
            return False
        return True

    async def _read(self, connection: _Connection) -> HttpRequest | None:
        """Return the next request, None at the end of the connection; raises BadRequest or TimeoutError."""
        reader = connection.reader
        async with asyncio.timeout(self._limits.idle_s):
            first = await reader.read(1)
        if not first:
            return None
        try:
            async with asyncio.timeout(self._limits.head_s):
                head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise BadRequest(431, f"the head of the request is longer than {HEAD_BYTES} bytes") from None
        except TimeoutError:
            raise BadRequest(408, "the request did not arrive in time") from None
        request = parse_head(head)
        if not request.body_bytes:
            return request
        try:
            async with asyncio.timeout(self._limits.body_s):
                return replace(request, body=await reader.readexactly(request.body_bytes))
        except TimeoutError:
            raise BadRequest(408, "the body of the request did not arrive in time") from None

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        response = self._application.at_once(request)
        if response is not None:
            return response
        response = await self._work(request)
        size = len(response.body)
        if size <= _SMALL_BYTES:
            return response
        if not self._has_room(size):
            del response  # made again when there is room: nothing large waits in memory
            if not await self._wait_for_room(size):
                return HttpResponse.problem(
                    503, "Busy", "too many answers wait for their readers", {"Retry-After": "5"}
                )
            response = await self._work(request)
        self._unsent += len(response.body)
        return replace(response, counted=True)

    async def _work(self, request: HttpRequest) -> HttpResponse:
        """Answer on a worker, as soon as one is free."""
        async with self._working:
            response = await self._workers.run(lambda: _guarded(self._application, request))
        if len(response.body) > self._limits.answer_bytes:
            return HttpResponse.problem(500, "TooLarge", "the answer is too large to send")
        return response

    def _has_room(self, size: int) -> bool:
        return self._unsent + size <= self._limits.unsent_bytes

    async def _wait_for_room(self, size: int) -> bool:
        """Wait until slow readers leave room for a large answer; False if that takes too long."""
        try:
            async with asyncio.timeout(self._limits.write_s), self._sent:
                await self._sent.wait_for(lambda: self._has_room(size))
        except TimeoutError:
            return False
        return True

    async def _send(self, connection: _Connection, request: HttpRequest | None, response: HttpResponse) -> None:
        size = len(response.body)
        try:
            keeps_open = request is not None and request.keeps_open
            body = b"" if request is not None and request.method == "HEAD" else response.body
            async with asyncio.timeout(self._limits.write_s + len(body) / self._limits.slowest_bytes_s):
                await _write(connection.writer, encode_head(response, length=size, keeps_open=keeps_open))
                view = memoryview(body)
                for at in range(0, len(view), _CHUNK_BYTES):
                    await _write(connection.writer, bytes(view[at : at + _CHUNK_BYTES]))
        except BaseException:
            connection.abort()
            raise
        finally:
            if response.counted:
                async with self._sent:
                    self._unsent -= size
                    self._sent.notify_all()

    def _open_stream(self, request: HttpRequest) -> AsyncIterator[bytes] | None:
        if request.method != "GET":
            return None
        try:
            events = self._application.stream(request, self._stream_workers)
        except HoldfastError as error:
            raise BadRequest(404, str(error)) from None
        if events is not None and self._streams >= self._limits.streams:
            raise BadRequest(503, f"{self._streams} pages follow runs already")
        return events

    async def _send_events(self, connection: _Connection, events: AsyncIterator[bytes]) -> None:
        """Send events until the client goes; it must read each within the time of a write."""
        response = HttpResponse(200, b"", "text/event-stream")
        self._streams += 1
        gone = asyncio.ensure_future(connection.reader.read(1))
        try:
            await _write(connection.writer, encode_head(response, length=None, keeps_open=False))
            while not gone.done():
                following = asyncio.ensure_future(anext(events))
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                    break
                async with asyncio.timeout(self._limits.write_s):
                    await _write(connection.writer, following.result())
        except StopAsyncIteration:
            pass  # no more events: the connection ends, and a browser opens a new one
        finally:
            self._streams -= 1
            gone.cancel()
            with contextlib.suppress(Exception):
                await events.aclose()  # type: ignore[attr-defined]  # an async generator
            connection.abort()


async def _linger(connection: _Connection) -> None:
    """Discard what the client still sends, for a moment: closing at once would destroy the answer on its way."""
    with contextlib.suppress(TimeoutError, OSError):
        connection.writer.write_eof()
        async with asyncio.timeout(_LINGER_S):
            for _ in range(_LINGER_READS):
                if not await connection.reader.read(_CHUNK_BYTES):
                    return


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


def _guarded(application: PageApplication, request: HttpRequest) -> HttpResponse:
    """Answer on a worker thread; an unexpected error is printed here and not told to the client."""
    try:
        return application.answer(request)
    except BadRequest as error:
        return HttpResponse.problem(error.status, "BadRequest", str(error))
    except HoldfastError as error:
        return HttpResponse.of_error(error)
    except Exception:  # noqa: BLE001  (the server stays up; the terminal shows what happened)
        traceback.print_exc(file=sys.stderr)
        return HttpResponse.problem(500, "Unexpected", "an unexpected error; the terminal of `holdfast serve` shows it")
