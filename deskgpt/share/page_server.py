"""A web server for one page, which nothing but this machine's own browser can reach.

`sample.py --serve` and `bench/report.py --serve` run it. It listens on 127.0.0.1 alone and writes no files. If a page
has a token, only addresses that begin with it are answered, and only the printed URL holds it.
"""

from __future__ import annotations

import hmac
import json
import os
import socketserver
import sys
import threading
from collections.abc import Generator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deskgpt.machine.errors import message_for_user

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # in a request's Host header
MOST_BODY_BYTES = 2_000_000
SILENT_S = 30.0  # a connection on which nothing moves for this long is closed
LAST_TOKEN_S = 5.0  # how long the end waits for streams to notice it

# No other page can read this one or embed it. What the page itself may load, its own HTML says.
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Events = Generator[dict[str, Any]]


class Page:
    """What is served."""

    token = ""  # without it in the address, nothing is answered; empty = no token

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        """Content type and content of a place below the page's address; None if nothing is there."""
        raise NotImplementedError

    def post(self, place: str, body: bytes) -> Events | None:
        """The events that answer a request, sent as they come; None if nothing is there.

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

    def do_GET(self) -> None:
        place, query = self.asked()
        found = None if place is None else self.server.page.get(place, query)
        if found is None:
            self.send_error(404)
        else:
            self.reply(200, *found)

    def do_POST(self) -> None:
        place, _ = self.asked()
        if place is None:
            self.send_error(404)
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 20 and int(length) <= MOST_BODY_BYTES):
            self.send_error(413, f"the request must have a Content-Length of at most {MOST_BODY_BYTES}")
            return
        try:
            events = self.server.page.post(place, self.rfile.read(int(length)))
        except ValueError as e:
            self.send_error(400, str(e))
            return
        if events is None:
            self.send_error(404)
        else:
            self.stream(events)

    def asked(self) -> tuple[str | None, str]:
        """The place below the page's address and the query; no place without the token, or under a foreign name.

        A foreign name in Host means that another page had its own name point to this machine (DNS rebinding).
        """
        path, _, query = self.path.partition("?")
        root, place = path[: len(self.server.root)], path[len(self.server.root) :]
        knows_token = hmac.compare_digest(root.encode("latin-1"), self.server.root.encode())
        hosts = [host.partition(":")[0].lower() for host in self.headers.get_all("Host", [])]
        return place if knows_token and len(hosts) == 1 and hosts[0] in NAMES else None, query

    def stream(self, events: Events) -> None:
        """Sends events as lines of JSON, until the server ends, or the client has gone: then sending fails."""
        self.server.streaming.add(threading.current_thread())
        try:
            self.begin_reply(200, "application/x-ndjson")
            with closing(events):
                for event in events:
                    self.send_line(event)
                    if self.server.ending.is_set():
                        self.send_line({"error": "the server was stopped"})
                        return
        except (ValueError, RuntimeError, MemoryError) as e:
            message = message_for_user(e, "ask for fewer tokens or a shorter prompt")
            self.send_line({"error": message or "a defect; the terminal shows where"})
            if message is None:
                raise
        finally:
            self.server.streaming.discard(threading.current_thread())

    def send_line(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event, allow_nan=False).encode() + b"\n")

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
        line = message or "there is nothing here"
        self.reply(code, "application/json", json.dumps({"error": line}).encode())

    def version_string(self) -> str:
        return "deskGPT"

    def log_message(self, format: str, *args: Any) -> None:
        pass  # the terminal stays quiet


def serve(page: Page, port: int) -> None:
    """Serves the page until Ctrl+C. Raises OSError if the port is taken."""
    with Server(page, port) as server:
        print(f"{server.url} (Ctrl+C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("no longer served", file=sys.stderr)
        finally:
            server.ending.set()
            for thread in list(server.streaming):  # each ends at its next event
                thread.join(LAST_TOKEN_S)
