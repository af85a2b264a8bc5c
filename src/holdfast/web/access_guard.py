"""Access to the page: checks of the Host header, the token and the origin of a request.

A page of another site can make a browser send requests here, and a name of its own can be made to lead
here (DNS rebinding). So the Host must be an address or a known name, and every request other than
GET must carry a header that no form and no other site can send.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass

from holdfast.web.http_request import BadRequest, HttpRequest
from holdfast.web.http_response import HttpResponse

COOKIE = "holdfast_token"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
METHODS = ("GET", "HEAD", "POST", "DELETE")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server bound to a host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def own_names() -> frozenset[str]:
    """Return the names of this machine by which others may call it."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]}) - {""}


@dataclass(frozen=True, slots=True)
class AccessGuard:
    """The rules of one server. With a `token`, every request needs it, as a cookie or in the address.

    A server on the loopback has the names of the loopback only. Ports are not compared: a tunnel may have another.
    """

    on_loopback: bool
    token: str | None = None
    names: frozenset[str] = frozenset()

    def check(self, request: HttpRequest) -> HttpResponse | None:
        """Return an answer in place of the requested one, or None; raises BadRequest for a refused request."""
        if request.method not in METHODS:
            raise BadRequest(405, f"the method {request.method} is not one of {', '.join(METHODS)}")
        if not self._knows(request.headers["host"]):
            raise BadRequest(
                421, "the Host header names another server; open the address that `holdfast serve` printed"
            )
        answer = self._check_token(request)
        if request.method in ("POST", "DELETE"):
            _check_own_page(request)
        return answer

    def _knows(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].lower()
        if name == "localhost" or name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or not self.on_loopback

    def _check_token(self, request: HttpRequest) -> HttpResponse | None:
        """Require the token; one in the address becomes a cookie, so that it leaves the address bar."""
        if self.token is None:
            return None
        given = request.query.get("token")
        if given is not None and request.method == "GET" and request.path == ("",):
            if not _same(given, self.token):
                raise BadRequest(401, "the token in the address is not this server's")
            cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            return HttpResponse(303, b"", headers={"Location": "/", "Set-Cookie": cookie})
        if not any(_same(value, self.token) for value in _cookies(request)):
            raise BadRequest(401, "this server needs the token of the address that `holdfast serve` printed")
        return None


def _check_own_page(request: HttpRequest) -> None:
    """Raise unless the request is from the page itself: no other site can send this header."""
    if request.headers.get("x-holdfast") != "1":
        raise BadRequest(403, "a request that starts work needs the header X-Holdfast: 1")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise BadRequest(403, "the request is from another site")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers["host"]:
        raise BadRequest(403, "the request is from another site")


def _cookies(request: HttpRequest) -> list[str]:
    parts = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
    return [value for name, _, value in parts if name == COOKIE]


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
