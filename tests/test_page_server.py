"""The server of both pages: whom it answers, what it refuses, and how its streams end."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from conftest import assert_one_line

from deskgpt.serve.page_server import HEADERS, HOST, MOST_BODY_BYTES, Events, Page, Server


class Counting(Page):
    """A page of one line; POST counts up to a number."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.ended = threading.Event()

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        return {"": ("text/html", b"page"), "data": ("text/plain", query.encode())}.get(place)

    def post(self, place: str, body: bytes) -> tuple[str, Events] | None:
        return ("application/x-ndjson", self.count(int(body))) if place == "count" else None

    def count(self, n: int) -> Events:
        try:
            for i in itertools.count() if n < 0 else range(n):
                yield {"i": i}
                time.sleep(0.001)
            raise ValueError("that is all")
        finally:
            self.ended.set()


@contextmanager
def serving(page: Page) -> Iterator[Server]:
    with Server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, method: str, place: str, body: Any = None, **headers: str) -> tuple[int, Any, bytes]:
    """(status, headers, body) of a request; place: the path below the page's address, or a whole one."""
    path = place if place.startswith("/") else server.root + place
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(HOST, server.server_port, timeout=30)) as connection:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def error_in(body: bytes) -> str:
    return json.loads(body)["error"]["message"]


@pytest.fixture(scope="module", params=["", "a-token"])
def server(request) -> Iterator[Server]:
    with serving(Counting(request.param)) as made:
        yield made


def test_page_and_its_places_are_served_and_nothing_else(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert ask(server, "GET", "")[::2] == (200, b"page")
    assert ask(server, "GET", "data?a=b")[::2] == (200, b"a=b")
    for place in ("data/", "../data", "..%2fdata", "./", "count", "/etc/passwd", "//["):
        assert ask(server, "GET", place)[0] == 404, place
    assert ask(server, "POST", "data", 5)[0] == 404
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(server, method, "")[0] == 501


def test_nothing_is_served_without_the_token():
    with serving(Counting("a-token")) as server:
        for path in ("/", "/data", "/a-tokeN/", "/a-token", "/a-toke/", "/a-tokenx/", "//", "/x/a-token/", "/%C3%A9/"):
            for method in ("GET", "POST"):
                status, _, body = ask(server, method, path)
                assert (status, error_in(body)) == (404, "there is nothing here"), path


@pytest.mark.parametrize(("method", "place"), [("GET", ""), ("GET", "nothing"), ("POST", "count"), ("PUT", "")])
def test_answers_let_no_other_page_read_or_embed_this_one(server, method, place):
    _, headers, _ = ask(server, method, place, 1)
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert headers["Server"] == "deskGPT"


HOSTS = dict.fromkeys(["127.0.0.1:80", "LOCALHOST", "localhost:9000"], 200)  # a tunnel may have another port
HOSTS |= dict.fromkeys(["example.com", "127.0.0.1.example.com", "localhost.example.com:80", ""], 404)


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
def test_only_this_machines_own_names_are_answered(server, host, status):
    assert ask(server, "GET", "", Host=host)[0] == status
    assert ask(server, "POST", "count", 1, Host=host)[0] == status


def first_line(server: Server, request: bytes) -> bytes:
    """What the server answers to a request as it is, which http.client would refuse to send."""
    with socket.create_connection((HOST, server.server_port), timeout=30) as connection:
        connection.sendall(request)
        with suppress(OSError):  # it may have been refused already
            connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").readline()


def test_malformed_requests_are_refused(server, capfd):
    get = f"GET {server.root} HTTP/1.1\r\n".encode()
    post = f"POST {server.root}count HTTP/1.1\r\nHost: localhost\r\n".encode()
    host = b"Host: localhost\r\n"
    requests = {
        get + host + b"\r\n": 200,
        get + host + b"Host: example.com\r\n\r\n": 404,
        get + b"\r\n": 404,
        "GET /é/ HTTP/1.1\r\n".encode() + host + b"\r\n": 404,
        b"GET / / /\r\n" + host + b"\r\n": 400,
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n": 414,
        get + host + b"X: y" * 20_000 + b"\r\n\r\n": 431,
        post + b"\r\n": 413,
        post + b"Transfer-Encoding: chunked\r\n\r\n": 413,
    }
    for length in (MOST_BODY_BYTES + 1, "9" * 5000, "-1", "x", ""):  # refused unread
        requests[post + f"Content-Length: {length}\r\n\r\n".encode()] = 413
    for request, status in requests.items():
        assert f" {status} ".encode() in first_line(server, request), request[:80]
    for garbage in (b"\0\xff\x16\x03\x01" * 50, b"GET\r\n\r\n", b"\r\n" * 9, b"GET / HTTP/9\r\n"):
        assert b" 200 " not in first_line(server, garbage)
    with socket.create_connection((HOST, server.server_port)):  # one that says nothing keeps nobody else waiting
        assert ask(server, "GET", "")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


# ---- streams -------------------------------------------------------------------------------------------------


def test_events_are_lines_of_json_and_a_mistake_is_one_too(server):
    status, _, body = ask(server, "POST", "count", 3)
    assert status == 200
    *counted, last = body.splitlines()
    assert [json.loads(line) for line in counted] == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert error_in(last) == "that is all"
    status, _, body = ask(server, "POST", "count", b"x")
    assert status == 400
    assert_one_line(error_in(body), "'x'")


def test_stream_ends_at_its_next_event_once_its_reader_has_gone_or_the_server_ends():
    for ends_first in ("reader", "server"):
        page = Counting()
        with serving(page) as server, closing(http.client.HTTPConnection(HOST, server.server_port)) as connection:
            connection.request("POST", "/count", b"-1")
            response = connection.getresponse()
            assert json.loads(response.readline()) == {"i": 0}
            if ends_first == "server":
                server.ending.set()
                assert error_in(response.read().splitlines()[-1]) == "the server was stopped"
            else:
                response.close()
                connection.close()
            assert page.ended.wait(10)


def test_taken_port_is_an_error(server):
    with pytest.raises(OSError, match="--port") as e:
        Server(Counting(), server.server_port)
    assert_one_line(e.value, server.server_port)
