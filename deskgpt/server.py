"""The server of `python sample.py --serve`: a page that shows what a model writes, and OpenAI's
API.

All addresses of the page begin with the writer's token, and programs send it as their API key. Only
what is printed at the start holds it.

GET /v1/models, POST /v1/completions and, with a chat model, /v1/chat/completions, streamed or not.
A setting that a request leaves out has the page's default, except the seed, which is then drawn.
What fields mean: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import secrets
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from data.tokenizer import Tokenizer
from deskgpt.chat import Writer
from deskgpt.engine import GenerationConfig, Sample
from deskgpt.errors import message_for_user, millions, raised_in_our_code, shortened
from deskgpt.settings import check, settings_of
from model import GPT

HOST = "127.0.0.1"
TRUSTED_HOSTS = [HOST, "localhost"]  # in a request's Host header
MOST_BODY_BYTES = 2_000_000
ARRIVAL_S = 10.0  # the head of a request, and its body, may take this long to arrive
SEND_S = 10.0  # a client that reads nothing for so long is cut off: others wait for their turn
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
    """Return an ASGI app for this machine's own browser and programs.

    A ValueError of our code answers with 400.
    """
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=TRUSTED_HOSTS, www_redirect=False),
            Middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BODY_BYTES),
        ],
        exception_handlers={HTTPException: error_reply, ValueError: error_reply},
    )


def run_app(app: Starlette, port: int, about: str) -> None:
    """Serve the app until Ctrl+C.

    Print `about` when it can be reached, in which {address} is its address.

    port: 0 takes a free one. Raises OSError, one line, if the port is taken.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as e:
        raise OSError(
            f"cannot listen on {HOST}, port {port}: {e.strerror}; choose another --port"
        ) from None
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
    # A traceback for each connection beyond the open files.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    app.state.server = uvicorn.Server(config)
    print(about.format(address=f"http://{HOST}:{listener.getsockname()[1]}"), flush=True)
    try:
        app.state.server.run(sockets=[listener])
    except KeyboardInterrupt:
        print("no longer served", file=sys.stderr)


# ---- requests ------------------------------------------------------------------------------------


class Protocol(H11Protocol):
    """HTTP, without clients that hold a connection and send no request, or half of one, or read no
    answer.
    """

    answered: Any = None  # the last request at the check before this one

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(ARRIVAL_S, self.drop_if_silent)

    def drop_if_silent(self) -> None:
        """Close the connection if no request has come since the last check, and none is being
        answered.
        """
        if self.transport.is_closing():
            return
        if self.cycle is self.answered and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
            return
        self.answered = self.cycle
        self.loop.call_later(ARRIVAL_S, self.drop_if_silent)

    def pause_writing(self) -> None:
        """Give the client SEND_S to read: the system's buffers and ours are full."""
        super().pause_writing()
        self.cut_off = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.cut_off.cancel()


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


async def in_turn(request: Request, writer: Writer, events: Iterator[Any]) -> AsyncIterator[Any]:
    """Yield the events of a text when no other one is written, each computed in a thread, so that
    the server answers others meanwhile.

    An error becomes the last event, as error_of has it; so does Ctrl+C.
    """
    try:
        async with writer.turn:
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


def streamed(events: AsyncIterator[Any], form: str, end: str, media_type: str) -> StreamingResponse:
    """Return a response of events, each as JSON in this form."""

    async def content() -> AsyncIterator[str]:
        async for event in events:
            yield form.format(json.dumps(event, allow_nan=False))
        yield end

    return StreamingResponse(content(), media_type=media_type)


# ---- errors --------------------------------------------------------------------------------------


def error_of(status: int, line: str) -> dict[str, Any]:
    """Return an error as OpenAI's API writes it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": None}}


async def error_reply(request: Request, e: Exception) -> Response:
    if isinstance(e, HTTPException):
        return JSONResponse(error_of(e.status_code, e.detail), e.status_code, e.headers)
    if not raised_in_our_code(e):
        raise e
    line = str(e).replace("write it like --", "write it like ")  # no command line here
    return JSONResponse(error_of(400, line), 400)


# ---- OpenAI's API --------------------------------------------------------------------------------


CHAT = "/v1/chat/completions"
MOST_STOPS = 16  # texts that end an answer: each is looked for after each token
# Our settings by their names in a request.
OPENAI_SETTINGS = {name: name for name in ("temperature", "top_p", "top_k", "seed")}
OPENAI_SETTINGS |= dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens")
# Fields that ask for more than one text and its tokens' number, which we do not give, and the value
# with which each asks for nothing. Others, such as a user's name, change no answer's form, and are
# ignored.
NOT_GIVEN: dict[str, Any] = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "tools": []}
NOT_GIVEN |= {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}}


def openai_routes(writer: Writer) -> list[Route]:
    def check_key(request: Request) -> None:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {writer.token}".encode()):
            raise HTTPException(
                401, "this is not the API key of this server; it printed the key when it started"
            )

    async def models(request: Request) -> Response:
        check_key(request)
        model = {"id": writer.trained.name, "object": "model", "created": 0, "owned_by": "deskgpt"}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(request: Request) -> Response:
        check_key(request)
        found = await json_object(request)
        asked = {name: value for name, value in found.items() if value is not None}
        is_chat = request.url.path == CHAT
        config = config_of(asked, writer.defaults)
        text, ids = await run_in_threadpool(begin_openai, writer, asked, is_chat)
        reply = Reply(writer.trained.name, text, ids, is_chat)
        written = writer.engine.write(ids, [text], config)
        if asked.get("stream"):
            events = in_turn(request, writer, reply.chunks(written))
            return streamed(events, "data: {}\n\n", "data: [DONE]\n\n", "text/event-stream")
        async for event in in_turn(request, writer, written):
            if isinstance(event, dict):  # an error
                return JSONResponse(event, 500)
            if await request.is_disconnected():
                break
        return JSONResponse(reply.full())

    completions = [Route(path, complete, methods=["POST"]) for path in ("/v1/completions", CHAT)]
    return [Route("/v1/models", models), *completions]


def config_of(asked: dict[str, Any], defaults: GenerationConfig) -> GenerationConfig:
    """Return the settings that a request asks for. Raises ValueError, in the request's words."""
    for name, nothing in NOT_GIVEN.items():
        if name in asked and repr(asked[name]) != repr(nothing):  # logprobs=0 is not False
            raise ValueError(f"{name}={shortened(asked[name])} is not supported; leave it out")
    known = settings_of(GenerationConfig)
    chosen: dict[str, Any] = {"seed": secrets.randbelow(2**32)}
    for name, setting in OPENAI_SETTINGS.items():
        if name in asked:
            chosen[setting] = check(asked[name], replace(known[setting], name=name), name)
    return replace(defaults, **chosen)


def begin_openai(writer: Writer, asked: dict[str, Any], is_chat: bool) -> tuple[Sample, Tensor]:
    """Return the text to write and its prompt (1, T). Raises ValueError, one line."""
    stops = asked.get("stop", writer.defaults.stop)
    stops = stops if isinstance(stops, list) else [stops]
    if len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(
            f"stop={shortened(stops)} must be a text or a list of at most {MOST_STOPS} texts"
        )
    if is_chat:
        return writer.begin(None, asked.get("messages", []), *stops)
    prompt = asked.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    text, ids = writer.begin(prompt, None, *stops)
    if ids.size(1) > writer.block_size:
        raise ValueError(
            f"the prompt has {ids.size(1):,} tokens, and the model's context has "
            f"{writer.block_size:,}; shorten it"
        )
    return text, ids


class Reply:
    """The reply to one request: one with the full text, or chunks of it."""

    def __init__(self, model: str, text: Sample, ids: Tensor, is_chat: bool) -> None:
        """ids: the prompt (1, T)."""
        self.text = text
        self.n_prompt = ids.size(1)
        self.is_chat = is_chat
        self.fields = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def full(self) -> dict[str, Any]:
        new = self.text.text[self.text.prompt_end :]
        return self.part("message", {"role": "assistant", "content": new}, is_last=True)

    def chunks(self, written: Iterator[list[str]]) -> Iterator[dict[str, Any]]:
        """Yield the text as it grows, a part for each token."""
        yield self.part("delta", {"role": "assistant", "content": ""})
        for (new,) in written:
            yield self.part("delta", {"content": new})
        yield self.part("delta", {}, is_last=True)

    def part(self, key: str, message: dict[str, str], is_last: bool = False) -> dict[str, Any]:
        n_new = len(self.text.tokens)
        usage = {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": n_new,
            "total_tokens": self.n_prompt + n_new,
        }
        reason = "stop" if self.text.done else "length"
        kind = "text_completion"
        choice: dict[str, Any] = {"text": message.get("content", "")}
        if self.is_chat:
            kind = "chat.completion.chunk" if key == "delta" else "chat.completion"
            choice = {key: message}
        choice |= {"index": 0, "logprobs": None, "finish_reason": reason if is_last else None}
        return self.fields | {
            "object": kind,
            "choices": [choice],
            "usage": usage if is_last else None,
        }


# ---- the page ------------------------------------------------------------------------------------


ALTERNATIVES = 8  # likeliest tokens that are shown next to the drawn one
PAGE = Path(__file__).with_name("page")


def page_routes(writer: Writer) -> list[Mount]:
    async def stream(request: Request) -> Response:
        asked = await json_object(request)
        prompt = asked.pop("prompt", None)
        messages = asked.pop("messages", None)
        try:
            config = GenerationConfig(**asked)
        except TypeError:
            raise ValueError("the request is not a JSON object of the page's settings") from None
        text, ids = await run_in_threadpool(writer.begin, prompt, messages, config.stop)
        events = in_turn(request, writer, page_events(writer, config, text, ids))
        return streamed(events, "{}\n", "", "application/x-ndjson")

    async def page(request: Request) -> Response:
        return JSONResponse(description(writer))

    files = Mount("/", StaticFiles(directory=PAGE, html=True))
    of_page = [Route("/page.json", page), Route("/write", stream, methods=["POST"]), files]
    return [Mount(f"/{writer.token}", routes=of_page)]


def description(writer: Writer) -> dict[str, Any]:
    """Return what the page is filled with."""
    saved = writer.trained.checkpoint
    # Without copies in 16 bits
    n_params = GPT.without_storage(writer.trained.model.config).num_params()
    details = [f"step {saved.iter_num:,}"] if saved else []
    if saved and math.isfinite(saved.best_val_loss):
        details.append(f"best val loss {saved.best_val_loss:.4f}")
    settings = settings_of(GenerationConfig)
    values = {name: getattr(writer.defaults, name) for name in settings}
    details += [f"{millions(n_params)} parameters", f"context of {writer.block_size:,} tokens"]
    return {
        "name": writer.trained.name,
        "details": details,
        "settings": {"prompt": writer.prompt} | values,
        "ranges": {
            name: (s.range.low, s.range.high) for name, s in settings.items() if s.types != (str,)
        },
        "system": writer.system if writer.chat_template else None,
    }


def page_events(
    writer: Writer, config: GenerationConfig, text: Sample, ids: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield what the page shows of a text: the prompt's length, each token and what can be shown
    since, the end.

    A token that is part of a character, or may become part of a stop text, shows nothing until a
    later one decides.
    """
    p = torch.empty(0)  # probabilities of the next token (V,)

    def watch(logits: Tensor) -> None:
        nonlocal p
        p = logits[0].cpu().double().softmax(0)

    yield {"prompt_tokens": ids.size(1), "block_size": writer.block_size}
    n = 0
    for (shown,) in writer.engine.write(ids, [text], config, watch):
        if len(text.tokens) > n:  # the last one is no token, but the rest
            n += 1
            yield describe(text.tokens[-1], p, text.tokenizer) | {"text": shown}
    yield {"end": "stop" if text.done else "length", "text": shown}


def describe(token: int, p: Tensor, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the drawn token and the likeliest ones in its place, with their probabilities, of p
    (V,).
    """
    if not p.isfinite().all():
        raise ValueError("the model's output is NaN, which gives no text; try --dtype=float32")
    likeliest = p.topk(min(ALTERNATIVES, len(p)))
    top = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return {
        "id": token,
        "name": name_of(token, tokenizer),
        "p": p[token].item(),
        "rank": int((p > p[token]).sum()) + 1,
        "top": [{"id": i, "name": name_of(i, tokenizer), "p": value} for i, value in top],
    }


def name_of(token: int, tokenizer: Tokenizer) -> str:
    """Return a token for people to read: its text in quotes, or its bytes if they are not whole
    characters.
    """
    content = tokenizer.decode_bytes([token])
    try:
        return repr(content.decode("utf-8"))
    except UnicodeDecodeError:
        return f"bytes {content.hex(' ').upper()}"
