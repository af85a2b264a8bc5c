"""Only the page itself is answered: other names, other sites, and requests without the token are refused."""

import pytest

from holdfast.web.access_guard import AccessGuard, is_loopback
from holdfast.web.http_request import BadRequest, parse_head

TOKEN = "secret-token"


def request(line="GET / HTTP/1.1", host="localhost:8000", *headers):
    return parse_head("\r\n".join([line, f"Host: {host}", *headers, "", ""]).encode())


LOCAL, OPEN = AccessGuard(on_loopback=True), AccessGuard(on_loopback=False, token=TOKEN, names=frozenset({"gpu7"}))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000"])
def test_names_of_the_loopback_are_known(host):
    assert LOCAL.check(request(host=host)) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1.nip.io",
        "10.0.0.1",
        "192.168.0.7:8000",
        "[2001:db8::1]",
        "gpu7",
        "",
        "localhost:",
        "localhost:port",
        "localhost/",
        "user@localhost",
        "localhost, evil.example",
        "[::1",
        "0x7f.1",
        "2130706433",
    ],
)
def test_other_hosts_are_refused_on_the_loopback(host):
    with pytest.raises(BadRequest) as found:
        LOCAL.check(request(host=host))
    assert found.value.status == 421


@pytest.mark.parametrize("host", ["192.168.0.7:8000", "gpu7:8000", "localhost", "[2001:db8::1]:80"])
def test_an_open_server_knows_addresses_and_its_own_names(host):
    assert OPEN.check(request(host=host, line=f"GET /?token={TOKEN} HTTP/1.1")).status == 303


def test_a_rebound_name_is_refused_by_an_open_server():
    with pytest.raises(BadRequest):
        OPEN.check(request(f"GET /?token={TOKEN} HTTP/1.1", "evil.example"))


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_have():
    answer = OPEN.check(request(f"GET /?token={TOKEN} HTTP/1.1"))
    assert answer.headers["Location"] == "/"
    assert answer.headers["Set-Cookie"] == f"holdfast_token={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert OPEN.check(request("GET /api/runs HTTP/1.1", "localhost", f"Cookie: a=b; holdfast_token={TOKEN}")) is None


@pytest.mark.parametrize(
    "bad",
    [
        request("GET /api/runs HTTP/1.1"),
        request("GET /static/app.js HTTP/1.1"),
        request("GET /?token=other HTTP/1.1"),
        request("GET /?token= HTTP/1.1"),
        request(f"GET /api/runs?token={TOKEN} HTTP/1.1"),
        request("GET / HTTP/1.1", "localhost", "Cookie: holdfast_token=other"),
        request("GET / HTTP/1.1", "localhost", "Cookie: holdfast_token="),
        request("GET / HTTP/1.1", "localhost", f"Cookie: xholdfast_token={TOKEN}"),
    ],
)
def test_nothing_is_answered_without_the_token(bad):
    with pytest.raises(BadRequest) as found:
        OPEN.check(bad)
    assert found.value.status == 401
    assert TOKEN not in str(found.value)


def test_another_site_can_start_nothing():
    own = "X-Holdfast: 1"
    for headers in (
        (),
        ("Content-Type: application/x-www-form-urlencoded",),
        (own, "Origin: http://evil.example"),
        (own, "Origin: null"),
        (own, "Sec-Fetch-Site: cross-site"),
        (own, "Sec-Fetch-Site: same-site"),
        ("X-Holdfast: true",),
    ):
        for method in ("POST", "DELETE"):
            with pytest.raises(BadRequest) as found:
                LOCAL.check(request(f"{method} /api/compare HTTP/1.1", "localhost:8000", *headers))
            assert found.value.status == 403
    assert LOCAL.check(request("POST / HTTP/1.1", "localhost:8000", own, "Origin: http://localhost:8000")) is None


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "PATCH", "TRACE", "CONNECT", "PROPFIND", "X"])
def test_other_methods_are_refused(method):
    with pytest.raises(BadRequest) as found:
        LOCAL.check(request(f"{method} / HTTP/1.1"))
    assert found.value.status == 405


def test_the_loopback_is_recognized():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.3.2.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.com", "")))
