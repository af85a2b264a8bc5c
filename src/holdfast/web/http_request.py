"""Requests of HTTP/1.1, parsed strictly: what two parsers could read differently is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

HEAD_BYTES = 16 * 1024
BODY_BYTES = 64 * 1024
_TARGET_BYTES = 8 * 1024
_HEADERS = 64
_QUERY_PARTS = 32
_REQUEST_LINE = re.compile(r"(?P<method>[A-Z]{1,16}) (?P<target>/[!-~]*) HTTP/1\.(?P<minor>[01])")
_HEADER = re.compile(r"(?P<name>[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}):[ \t]*(?P<value>[\t -~]*)")
_ONCE = frozenset({"host", "content-length", "transfer-encoding", "content-type", "origin", "cookie", "x-holdfast"})
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class BadRequest(Exception):
    """A request that is refused: the status of the answer, and the reason for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request: path segments and query are decoded, names of headers are in lower case."""

    method: str
    path: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    keeps_open: bool
    body_bytes: int = 0
    body: bytes = field(default=b"", repr=False)


def parse_head(head: bytes) -> HttpRequest:
    """Parse a request up to its empty line; raises BadRequest for anything unusual."""
    try:
        lines = head.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    except UnicodeDecodeError:
        raise BadRequest(400, "the head of the request is not ASCII") from None
    line = _REQUEST_LINE.fullmatch(lines[0])
    if line is None:
        raise BadRequest(400, "the request line is not METHOD /path HTTP/1.1")
    if len(line["target"]) > _TARGET_BYTES:
        raise BadRequest(414, f"the address is longer than {_TARGET_BYTES} bytes")
    headers = _parse_headers(lines[1:])
    path, _, query = line["target"].partition("?")
    if "#" in line["target"]:
        raise BadRequest(400, "the address has a fragment")
    connection = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    keeps_open = "close" not in connection and (line["minor"] == "1" or "keep-alive" in connection)
    return HttpRequest(
        line["method"], parse_path(path), _parse_query(query), headers, keeps_open, _body_bytes(line["method"], headers)
    )


def _parse_headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > _HEADERS:
        raise BadRequest(431, f"more than {_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise BadRequest(400, "a header is not of the form Name: value")
        name = match["name"].lower()
        if name in headers and name in _ONCE:
            raise BadRequest(400, f"the header {name} is given twice")
        headers[name] = match["value"].strip(" \t")
    if "host" not in headers:
        raise BadRequest(400, "the header Host is missing")
    return headers


def _body_bytes(method: str, headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise BadRequest(501, "Transfer-Encoding is not supported: send a Content-Length")
    text = headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise BadRequest(400, "Content-Length is not a number")
    if int(text) > BODY_BYTES:
        raise BadRequest(413, f"the body is longer than {BODY_BYTES} bytes")
    if int(text) and method not in ("POST", "DELETE"):
        raise BadRequest(400, f"{method} has no body")
    return int(text)


def parse_path(path: str) -> tuple[str, ...]:
    """Return the decoded segments of a path. An encoded slash stays inside its segment."""
    return tuple(_decode(segment) for segment in path.removeprefix("/").split("/"))


def _parse_query(query: str) -> dict[str, str]:
    if not query:
        return {}
    parts = query.split("&")
    if len(parts) > _QUERY_PARTS:
        raise BadRequest(400, f"the query has more than {_QUERY_PARTS} parts")
    found: dict[str, str] = {}
    for part in parts:
        name, _, value = part.partition("=")
        name = _decode(name.replace("+", " "))
        if name in found:
            raise BadRequest(400, "a part of the query is given twice")
        found[name] = _decode(value.replace("+", " "))
    return found


def _decode(text: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise BadRequest(400, "a percent sign in the address is not an escape")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise BadRequest(400, "the address is not UTF-8") from None
