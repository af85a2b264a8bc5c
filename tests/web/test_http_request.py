"""Requests are parsed strictly: what two parsers could read differently is refused, and nothing else is raised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.web.http_request import BadRequest, parse_head


def head(line="GET / HTTP/1.1", *headers):
    return "\r\n".join([line, "Host: localhost", *headers, "", ""]).encode("latin-1")


def test_a_request_is_parsed():
    request = parse_head(head("POST /api/runs/a%2Fb?x=1&name=a%26b+c HTTP/1.1", "Content-Length: 5", "X-Holdfast: 1"))
    assert request.method == "POST"
    assert request.path == ("api", "runs", "a/b")
    assert request.query == {"x": "1", "name": "a&b c"}
    assert (request.body_bytes, request.keeps_open, request.headers["x-holdfast"]) == (5, True, "1")


def test_connections_stay_open_as_the_client_asks():
    assert not parse_head(head("GET / HTTP/1.1", "Connection: close")).keeps_open
    assert not parse_head(head("GET / HTTP/1.0")).keeps_open
    assert parse_head(head("GET / HTTP/1.0", "Connection: keep-alive")).keeps_open


REFUSED = {
    "two lengths": head("POST / HTTP/1.1", "Content-Length: 5", "Content-Length: 6"),
    "two equal lengths": head("POST / HTTP/1.1", "Content-Length: 5", "Content-Length: 5"),
    "a list of lengths": head("POST / HTTP/1.1", "Content-Length: 5, 5"),
    "a signed length": head("POST / HTTP/1.1", "Content-Length: +5"),
    "a negative length": head("POST / HTTP/1.1", "Content-Length: -1"),
    "a huge length": head("POST / HTTP/1.1", "Content-Length: 99999999999"),
    "chunks": head("POST / HTTP/1.1", "Transfer-Encoding: chunked"),
    "chunks and a length": head("POST / HTTP/1.1", "Content-Length: 5", "Transfer-Encoding: chunked"),
    "hidden chunks": head("POST / HTTP/1.1", "Transfer-Encoding : chunked"),
    "a folded header": head("GET / HTTP/1.1", "X: a", " b"),
    "a bare line feed": head("GET / HTTP/1.1", "X: a\nTransfer-Encoding: chunked"),
    "a bare return": head("GET / HTTP/1.1", "X: a\rY: b"),
    "a null": head("GET / HTTP/1.1", "X: a\0b"),
    "two hosts": head("GET / HTTP/1.1", "Host: evil.example"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a body to read": head("GET / HTTP/1.1", "Content-Length: 5"),
    "an absolute address": head("GET http://evil.example/ HTTP/1.1"),
    "an asterisk": head("OPTIONS * HTTP/1.1"),
    "an authority": head("CONNECT evil.example:443 HTTP/1.1"),
    "a tab": head("GET\t/ HTTP/1.1"),
    "two spaces": head("GET  / HTTP/1.1"),
    "HTTP/2": b"PRI * HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "a lower-case method": head("get / HTTP/1.1"),
    "no method": head("/ HTTP/1.1"),
    "a fragment": head("GET /#a HTTP/1.1"),
    "half an escape": head("GET /%2 HTTP/1.1"),
    "no escape": head("GET /%zz HTTP/1.1"),
    "no UTF-8": head("GET /%ff HTTP/1.1"),
    "an overlong slash": head("GET /%c0%af HTTP/1.1"),
    "Latin-1": head("GET /\xe9 HTTP/1.1"),
    "many headers": head("GET / HTTP/1.1", *(f"X-{n}: a" for n in range(100))),
    "a part given twice": head("GET /?a=1&a=2 HTTP/1.1"),
    "many parts": head("GET /?" + "&".join(f"a{n}=1" for n in range(50)) + " HTTP/1.1"),
    "a long address": head("GET /" + "a" * 9000 + " HTTP/1.1"),
    "nothing": b"\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusual_requests_are_refused(name):
    with pytest.raises(BadRequest) as found:
        parse_head(REFUSED[name])
    assert 400 <= found.value.status < 600


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data):
    try:
        request = parse_head(data + b"\r\n\r\n")
    except BadRequest:
        return
    assert request.headers["host"] is not None


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_an_encoded_segment_comes_back_whole(text):
    from urllib.parse import quote

    assert parse_head(head(f"GET /api/{quote(text, safe='')} HTTP/1.1")).path == ("api", text)
