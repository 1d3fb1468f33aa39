"""A web server for one page, which nothing but this machine's own browser and programs can reach.

`sample.py --serve` and `bench/report.py --serve` run it. It listens on 127.0.0.1 alone and writes no files. If a page
has a token, only addresses that begin with it are answered, and /v1/ for programs that send it as their API key. Only
what is printed at the start holds it.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import socketserver
import sys
import threading
from collections.abc import Generator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deskgpt.system.errors import message_for_user

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # in a request's Host header
MOST_BODY_BYTES = 2_000_000
SILENT_S = 30.0  # a connection on which nothing moves for this long is closed
LAST_TOKEN_S = 5.0  # how long the end waits for streams to notice it
API = "/v1/"  # where programs ask that bring the token as their key
FRAMES = {  # of an event, by content type
    "application/json": "{}",
    "application/x-ndjson": "{}\n",
    "text/event-stream": "data: {}\n\n",
}

# No other page can read this one or embed it. What the page itself may load, its own HTML says.
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

# Objects, and texts as they are. None sends nothing; the answer ends there if its reader has gone.
Events = Generator[dict[str, Any] | str | None]


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises ValueError, one line."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("the request is not a JSON object")
    return found


class Page:
    """What is served."""

    token = ""  # without it in the address, nothing is answered; empty = no token

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        """Content type and content of a place below the page's address; None if nothing is there."""
        raise NotImplementedError

    def post(self, place: str, body: bytes) -> tuple[str, Events] | None:
        """The content type and the events that answer a request, sent as they come; None if nothing is there.

        Raises ValueError, one line, for a request that is refused.
        """
        return None


class Server(ThreadingHTTPServer):
    """Serves a page on a port, 0 for a free one. Raises OSError, one line, if it is taken."""

    allow_reuse_address = os.name == "posix"  # on Windows it would let two servers share a port

    def __init__(self, page: Page, port: int) -> None:
        self.page = page
        self.root = f"/{page.token}/" if page.token else "/"
        self.ending = threading.Event()
        self.streaming: set[threading.Thread] = set()
        super().__init__((HOST, port), Handler)
        self.url = f"http://{HOST}:{self.server_port}{self.root}"

    def server_bind(self) -> None:
        port = self.server_address[1]
        try:
            socketserver.TCPServer.server_bind(self)  # HTTPServer's asks the network for this machine's name
        except OSError as e:
            raise OSError(f"cannot listen on {HOST}, port {port}: {e.strerror}; choose another --port") from None
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the browser may go at any time
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SILENT_S
    default_request_version = "HTTP/1.0"  # malformed requests get a status and HEADERS too
    disable_nagle_algorithm = True  # each event goes out at once
    streams = ""  # the content type of a stream that has begun

    def do_GET(self) -> None:
        place = self.place()
        if place is None:
            return
        found = self.server.page.get(place, self.path.partition("?")[2])
        if found is None:
            self.send_error(404)
        else:
            self.reply(200, *found)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 20 and int(length) <= MOST_BODY_BYTES):
            self.send_error(413, f"the request must have a Content-Length of at most {MOST_BODY_BYTES}")
            return
        body = self.rfile.read(int(length))  # all of it, or the client may not get to read what is refused
        place = self.place()
        if place is None:
            return
        try:
            answer = self.server.page.post(place, body)
        except ValueError as e:
            self.send_error(400, str(e))
            return
        if answer is None:
            self.send_error(404)
        else:
            self.stream(*answer)

    def place(self) -> str | None:
        """The place below the page's address; None, with an error sent, without the token, or under a foreign name.

        A foreign name in Host means that another page had its own name point to this machine (DNS rebinding).
        """
        path = self.path.partition("?")[0]
        root = self.server.root
        token = self.server.page.token
        hosts = [host.partition(":")[0].lower() for host in self.headers.get_all("Host", [])]
        if len(hosts) != 1 or hosts[0] not in NAMES:
            self.send_error(404)
            return None
        if token and path.startswith(API):
            if is_same(self.headers.get("Authorization", ""), f"Bearer {token}"):
                return path[1:]
            self.send_error(401, "this is not the API key of this server; it printed the key when it started")
            return None
        if is_same(path[: len(root)], root):
            return path[len(root) :]
        self.send_error(404)
        return None

    def stream(self, kind: str, events: Events) -> None:
        """Sends events until the server ends, or the client has gone: then sending fails."""
        self.server.streaming.add(threading.current_thread())
        try:
            with closing(events):
                for event in events:
                    if event is not None:
                        self.send_event(kind, event)
                    elif self.is_gone():
                        return
                    if self.server.ending.is_set():
                        self.break_off(503, "the server was stopped")
                        return
        except (ValueError, RuntimeError, MemoryError) as e:
            message = message_for_user(e, "ask for fewer tokens or a shorter prompt")
            self.break_off(500, message or "a defect; the terminal shows where")
            if message is None:
                raise
        finally:
            self.server.streaming.discard(threading.current_thread())

    def send_event(self, kind: str, event: dict[str, Any] | str) -> None:
        if not self.streams:
            self.streams = kind
            self.begin_reply(200, kind)
        text = event if isinstance(event, str) else json.dumps(event, allow_nan=False)
        self.wfile.write(FRAMES[kind].format(text).encode())

    def break_off(self, status: int, line: str) -> None:
        """Ends a reply with an error: as an event if it has begun."""
        if self.streams:
            self.send_event(self.streams, error_of(status, line))
        else:
            self.send_error(status, line)

    def is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def begin_reply(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind}).items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status: int, kind: str, content: bytes) -> None:
        self.begin_reply(status, kind)
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors are one line, as JSON; http.server's own ones too, of malformed requests and other methods."""
        error = error_of(code, message or "there is nothing here")
        self.reply(code, "application/json", json.dumps(error).encode())

    def version_string(self) -> str:
        return "deskGPT"

    def log_message(self, format: str, *args: Any) -> None:
        pass  # the terminal stays quiet


def is_same(given: str, expected: str) -> bool:
    """Whether these are the same; the time that it takes tells nothing about what is expected."""
    return hmac.compare_digest(given.encode("latin-1"), expected.encode())


def error_of(status: int, line: str) -> dict[str, Any]:
    """An error as OpenAI's API writes it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": None}}


def serve(page: Page, port: int) -> None:
    """Serves the page until Ctrl+C. Raises OSError if the port is taken."""
    with Server(page, port) as server:
        print(f"{server.url} (Ctrl+C ends it)", flush=True)
        if page.token:
            base_url = f"http://{HOST}:{server.server_port}{API.rstrip('/')}"
            print(f"for programs, as OpenAI's API: base_url={base_url} api_key={page.token}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("no longer served", file=sys.stderr)
        finally:
            server.ending.set()
            for thread in list(server.streaming):  # each ends at its next event
                thread.join(LAST_TOKEN_S)
