"""Answers of HTTP: body, type, security headers; errors as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from holdfast.core.errors import (
    Damaged,
    HoldfastError,
    InvalidArgument,
    Mismatch,
    NotFound,
    StorageError,
    TimedOut,
    Unsupported,
    Untrusted,
)
from holdfast.web.json_text import to_json

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": POLICY,
}
_STATUSES: tuple[tuple[type[HoldfastError], int], ...] = (
    (NotFound, 404),
    (InvalidArgument, 400),
    (Unsupported, 422),
    (Mismatch, 422),
    (Damaged, 422),
    (Untrusted, 403),
    (TimedOut, 504),
    (StorageError, 502),
)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One answer."""

    status: int
    body: bytes = field(repr=False)
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    counted: bool = False  # in the budget of answers that wait for their readers

    @staticmethod
    def of(value: Any, status: int = 200) -> HttpResponse:
        """Return a value as JSON."""
        return HttpResponse(status, to_json(value))

    @staticmethod
    def problem(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
        """Return an error as JSON."""
        body = to_json({"error": {"kind": kind, "message": message}})
        return HttpResponse(status, body, headers=headers or {})

    @staticmethod
    def of_error(error: HoldfastError) -> HttpResponse:
        """Return one of Holdfast's errors with a fitting status."""
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
        return HttpResponse.problem(status, type(error).__name__, str(error))


def encode_head(response: HttpResponse, *, length: int | None, keeps_open: bool) -> bytes:
    """Return the head of an answer; without a length, the body ends with the connection."""
    headers = {
        "Content-Type": f"{response.content_type}; charset=utf-8",
        "Cache-Control": "no-store",
        **_HEADERS,
        **response.headers,
        "Connection": "keep-alive" if keeps_open else "close",
    }
    if length is not None:
        headers["Content-Length"] = str(length)
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
