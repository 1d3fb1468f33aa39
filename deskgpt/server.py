"""The server of `python sample.py --serve`: OpenAI's API, and a page that shows what a model writes
through it.

The address of the page holds a token, which the page and other programs send as their
API key. Only what is printed at the start holds it.

GET /v1/models, POST /v1/completions and, with a chat model, /v1/chat/completions, streamed or not.
A setting that a request leaves out has the page's default, except the seed, which is then drawn.
What fields mean: https://platform.openai.com/docs/api-reference
"""

import asyncio
import json
import math
import secrets
import socket
import time
import webbrowser
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from torch import Tensor

from data.chat.template import messages_in
from deskgpt.chat import Writer
from deskgpt.checkpoint import val_loss_of_weights
from deskgpt.engine import GenerationConfig
from deskgpt.errors import message_for_user, raised_in_our_code, shortened
from deskgpt.settings import settings_of
from model import GPT

HOST = "127.0.0.1"
LAST_TOKEN_S = 5  # Ctrl+C waits this long for streams to end
# The token is part of the page's address: no other page gets it, and no file on the disk.
HEADERS = [("Referrer-Policy", "no-referrer"), ("Cache-Control", "no-store")]
PAGE = Path(__file__).with_name("page")
CHAT = "/v1/chat/completions"
SETTINGS = settings_of(GenerationConfig)


def make_app(writer: Writer) -> Starlette:
    """Return an ASGI app for this machine's own browser and programs.

    A ValueError of our code answers with 400.
    """
    token = secrets.token_urlsafe(24)  # who has it may ask
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", complete, methods=["POST"]),
            Route(CHAT, complete, methods=["POST"]),
            Mount(f"/{token}", StaticFiles(directory=PAGE, html=True)),
        ],
        exception_handlers={HTTPException: error_reply, ValueError: error_reply},
    )
    app.state.writer = writer
    app.state.token = token
    app.state.turn = asyncio.Lock()  # held while a token is computed
    return app


def run_app(app: Starlette, port: int, opens: bool = False) -> None:
    """Serve the app until Ctrl+C, and print its address when it can be reached.

    port: 0 takes a free one. opens: in a browser, too. Raises OSError, one line, if the port is
    taken.
    """
    listener = socket.create_server((HOST, port))
    config = uvicorn.Config(
        app,
        headers=HEADERS,
        access_log=False,
        log_level="error",
        timeout_graceful_shutdown=LAST_TOKEN_S,
    )
    app.state.server = uvicorn.Server(config)
    address = f"http://{HOST}:{listener.getsockname()[1]}"
    print(f"{address}/{app.state.token}/ (Ctrl+C ends it)")
    print(
        f"for programs, as OpenAI's API: base_url={address}/v1 api_key={app.state.token}",
        flush=True,
    )
    if opens:
        webbrowser.open(f"{address}/{app.state.token}/")
    app.state.server.run(sockets=[listener])


# ---- requests ------------------------------------------------------------------------------------


async def json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request's body, without its nulls. Raises ValueError, one
    line.
    """
    try:
        found = await request.json()
    except (ValueError, RecursionError, ClientDisconnect):
        found = None
    if not isinstance(found, dict):
        raise ValueError("the request is not a JSON object")
    return {name: value for name, value in found.items() if value is not None}


async def in_turn(request: Request, events: Iterator[Any]) -> AsyncIterator[Any]:
    """Yield the events of a text, each computed in a thread, so that the server answers others
    meanwhile.

    Texts take turns, an event each: no reader that is slow, or gone, keeps another one waiting. An
    error becomes the last event, as error_of has it; so does Ctrl+C.
    """
    state = request.app.state
    try:
        while not state.server.should_exit:
            async with state.turn:
                event = await run_in_threadpool(next, events, None)
            if event is None:
                return
            yield event
        yield error_of("the server was stopped")
    except (ValueError, RuntimeError, MemoryError) as e:
        message = message_for_user(e, "ask for fewer tokens or a shorter prompt")
        if message is None:
            raise
        yield error_of(message)


async def server_sent(events: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Yield the lines of a stream of events (text/event-stream)."""
    async for event in events:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def error_of(line: str) -> dict[str, Any]:
    """Return an error as OpenAI's API writes it."""
    return {"error": {"message": line, "type": "error"}}


async def error_reply(request: Request, e: Exception) -> Response:
    if isinstance(e, HTTPException):
        return JSONResponse(error_of(e.detail), e.status_code)
    if not raised_in_our_code(e):
        raise e
    # A request has no command line, and another name for this setting.
    line = str(e).replace("--", "").replace("max_new_tokens", "max_tokens")
    return JSONResponse(error_of(line), 400)


# ---- OpenAI's API --------------------------------------------------------------------------------


def writer_for(request: Request) -> Writer:
    """Return the writer if the request has the token. Raises HTTPException."""
    state = request.app.state
    given = request.headers.get("Authorization", "")
    if not secrets.compare_digest(given.encode(), f"Bearer {state.token}".encode()):
        raise HTTPException(
            401, "this is not the API key of this server; it printed the key when it started"
        )
    writer: Writer = state.writer
    return writer


async def models(request: Request) -> Response:
    """Return the only model, with its facts and the settings with which the page begins."""
    writer = writer_for(request)
    saved = writer.trained.checkpoint
    loss = val_loss_of_weights(saved) if saved else math.inf
    # The model here holds some weights twice, in 16 bits, too: count those of a new one.
    n_params = GPT.without_storage(writer.trained.model.config).num_params()
    defaults = {name: getattr(writer.defaults, name) for name in SETTINGS}
    model = {
        "id": writer.trained.name,
        "object": "model",
        "iter_num": saved and saved.iter_num,
        "val_loss": loss if math.isfinite(loss) else None,
        "n_params": n_params,
        "block_size": writer.block_size,
        "settings": {"prompt": writer.prompt} | defaults,
        "system": writer.system if writer.chat_template else None,
    }
    return JSONResponse({"object": "list", "data": [model]})


async def complete(request: Request) -> Response:
    writer = writer_for(request)
    asked = await json_object(request)
    reply = await run_in_threadpool(Reply, writer, asked, request.url.path == CHAT)
    chunks = in_turn(request, reply.chunks())
    if reply.is_stream:
        return StreamingResponse(server_sent(chunks), media_type="text/event-stream")
    async for chunk in chunks:
        if "error" in chunk:
            return JSONResponse(chunk, 500)
        if await request.is_disconnected():
            break
    new = reply.text.text[reply.text.prompt_end :]
    return JSONResponse(reply.part(new, reply.logprobs, is_last=True))


OPENAI_SETTINGS = ("temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens")
MOST_ALTERNATIVES = 20  # likeliest tokens of which a reply has the probabilities
# Fields that ask for more than one text, which we do not give, and the value with which each asks
# for nothing. Others, such as a user's name, change no answer's form, and are ignored.
NOT_GIVEN: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "response_format": {"type": "text"},
}


class Reply:
    """The reply to one request: one with the full text, or chunks of it."""

    def __init__(self, writer: Writer, asked: dict[str, Any], is_chat: bool) -> None:
        """Raises ValueError, one line."""
        for name, nothing in NOT_GIVEN.items():
            if asked.get(name, nothing) != nothing:
                raise ValueError(f"{name}={shortened(asked[name])} is not supported; leave it out")
        stops = asked.get("stop", writer.defaults.stop)
        stops = stops if isinstance(stops, list) else [stops]
        if not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"stop={shortened(stops)} must be a text or a list of texts")
        # A chat's logprobs is true, and top_logprobs a number; otherwise logprobs is the number.
        # True alone counts as 1; False asks for none.
        self.n_top = asked.get("top_logprobs", asked.get("logprobs", False))
        if not isinstance(self.n_top, int) or not 0 <= self.n_top <= MOST_ALTERNATIVES:
            raise ValueError(
                f"logprobs={shortened(self.n_top)} must be true or 0 to {MOST_ALTERNATIVES}"
            )
        self.writer = writer
        chosen: dict[str, Any] = {"seed": secrets.randbelow(2**32)}
        for name in OPENAI_SETTINGS:
            if name in asked:
                chosen[name if name in SETTINGS else "max_new_tokens"] = asked[name]
        self.config = replace(writer.defaults, **chosen)
        self.is_chat = is_chat
        self.is_stream = bool(asked.get("stream"))
        if is_chat:
            messages = messages_in(asked.get("messages"))
            if not messages or messages[-1].role != "user":
                raise ValueError("the last message must be the user's")
            self.text, self.ids = writer.answer(messages, *stops)
        else:
            self.text, self.ids = writer.begin(asked.get("prompt"), *stops)
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if self.is_stream else "chat.completion"
        self.fields = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": writer.trained.name,
        }
        self.logprobs: list[dict[str, Any]] = []  # of the tokens so far

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the text as it grows, a part for each token, and one for what was held back.

        A token that is part of a character, or may become part of a stop text, shows nothing until
        a later one decides.
        """
        yield self.part("", [])
        n = 0
        for (new,), logits in self.writer.engine.write(self.ids, [self.text], self.config):
            if logits is not None and self.n_top is not False:
                self.logprobs.append(self.drawn(self.text.tokens[-1], logits[0]))
            yield self.part(new, self.logprobs[n:], is_last=logits is None)
            n = len(self.logprobs)

    def part(self, new: str, logprobs: list[Any], is_last: bool = False) -> dict[str, Any]:
        n_prompt = self.ids.size(1)
        n_new = len(self.text.tokens)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
        }
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice["logprobs"] = {"content": logprobs} if logprobs else None
        if is_last:
            choice["finish_reason"] = "stop" if self.text.done else "length"
        if self.is_chat:
            message = {"content": new}
            if not self.is_stream or not self.text.tokens:  # the first of a stream
                message["role"] = "assistant"
            choice["delta" if self.is_stream else "message"] = message
        else:
            choice["text"] = new
        return self.fields | {"choices": [choice], "usage": usage if is_last else None}

    def drawn(self, token: int, logits: Tensor) -> dict[str, Any]:
        """Return the drawn token and the likeliest ones in its place, with their probabilities by
        the logits (V,).
        """
        p = logits.cpu().double().log_softmax(0)
        if p.isnan().any():
            raise ValueError("the model's output is NaN, which gives no text; try --dtype=float32")
        likeliest = p.topk(min(self.n_top, len(p))).indices.tolist()
        return self.entry(token, p) | {
            "rank": int((p > p[token]).sum()) + 1,
            "top_logprobs": [self.entry(other, p) for other in likeliest],
        }

    def entry(self, token: int, p: Tensor) -> dict[str, Any]:
        content = self.text.tokenizer.decode_bytes([token])
        return {
            "id": token,
            "token": content.decode("utf-8", "replace"),
            "bytes": list(content),
            "logprob": max(p[token].item(), -9999.0),  # JSON has no infinity
        }
