"""The web server of `sample.py --serve`.

    run_app(make_app([Route("/", page)]), 8000, "{address} is served")

It listens on this machine only, answers no request that names another host (DNS rebinding), limits the size of
requests and the time that they may take to arrive, and sends no header that would let other sites read a page or embed
it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from deskgpt.system.errors import message_for_user, raised_in_our_code

HOST = "127.0.0.1"
TRUSTED_HOSTS = [HOST, "localhost"]  # in a request's Host header
MOST_BODY_BYTES = 2_000_000
ARRIVAL_S = 10.0  # the head of a request, and its body, may take this long to arrive
LAST_TOKEN_S = 5  # Ctrl+C waits this long for streams to end

# What the page itself may load, its own HTML says.
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(routes: Sequence[BaseRoute]) -> Starlette:
    """Return an ASGI app for this machine's own browser and programs. A ValueError of our code answers with 400."""
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=TRUSTED_HOSTS, www_redirect=False),
            Middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BODY_BYTES),
        ],
        exception_handlers={HTTPException: error_reply, ValueError: error_reply},
    )


def run_app(app: Starlette, port: int, about: str) -> None:
    """Serve the app until Ctrl+C. Print `about` when it can be reached, in which {address} is its address.

    port: 0 takes a free one. Raises OSError, one line, if the port is taken.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as e:
        raise OSError(f"cannot listen on {HOST}, port {port}: {e.strerror}; choose another --port") from None
    config = uvicorn.Config(
        app,
        http=Protocol,
        backlog=16,  # asyncio tries to accept this many at once, also if no file is left for them
        headers=list(HEADERS.items()),
        server_header=False,
        access_log=False,
        proxy_headers=False,
        log_level="error",
        timeout_graceful_shutdown=LAST_TOKEN_S,
    )
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a traceback for each connection beyond the open files
    app.state.server = uvicorn.Server(config)
    print(about.format(address=f"http://{HOST}:{listener.getsockname()[1]}"), flush=True)
    try:
        app.state.server.run(sockets=[listener])
    except KeyboardInterrupt:
        print("no longer served", file=sys.stderr)


# ---- requests ------------------------------------------------------------------------------------------------


class Protocol(H11Protocol):
    """HTTP, without clients that hold a connection and send no request, or half of one."""

    answered: Any = None  # the last request at the check before this one

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(ARRIVAL_S, self.drop_if_silent)

    def drop_if_silent(self) -> None:
        """Close the connection if no request has come since the last check, and none is being answered."""
        if self.transport.is_closing():
            return
        if self.cycle is self.answered and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
            return
        self.answered = self.cycle
        self.loop.call_later(ARRIVAL_S, self.drop_if_silent)


async def json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raises ValueError and HTTPException, one line."""
    try:
        async with asyncio.timeout(ARRIVAL_S):
            body = await request.body()
        found = json.loads(body)
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, "the request did not arrive in time") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("the request is not a JSON object")
    return found


async def in_threads(request: Request, events: Iterator[Any]) -> AsyncIterator[Any]:
    """Yield the items of an iterator, each computed in a thread, so that the server answers others meanwhile.

    An error becomes the last item, as error_of has it; so does Ctrl+C.
    """
    try:
        async for event in iterate_in_threadpool(events):
            if request.app.state.server.should_exit:
                yield error_of(503, "the server was stopped")
                return
            yield event
    except (ValueError, RuntimeError, MemoryError) as e:
        message = message_for_user(e, "ask for fewer tokens or a shorter prompt")
        if message is None:
            traceback.print_exception(e)
        yield error_of(500, message or "a defect; the terminal shows its traceback")


# ---- errors --------------------------------------------------------------------------------------------------


def error_of(status: int, line: str) -> dict[str, Any]:
    """Return an error as OpenAI's API writes it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": None}}


async def error_reply(request: Request, e: Exception) -> Response:
    if isinstance(e, HTTPException):
        return JSONResponse(error_of(e.status_code, e.detail), e.status_code, e.headers)
    if not raised_in_our_code(e):
        raise e
    return JSONResponse(error_of(400, str(e)), 400)
