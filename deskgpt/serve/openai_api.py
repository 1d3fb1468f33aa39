"""OpenAI's API for the model of a page, so that programs made for that API can use it.

GET /v1/models, POST /v1/completions and, with a model that talks, /v1/chat/completions, streamed or not. Programs send
the writer's token as their API key. A setting that a request leaves out has the page's default, except the seed, which
is then drawn. Other fields are ignored. What fields mean: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from deskgpt.generate.text import Sample
from deskgpt.generate.writer import Writer
from deskgpt.serve.server import in_threads, json_object
from deskgpt.system.terminal import shortened

CHAT = "/v1/chat/completions"
MOST_STOPS = 16  # texts that end an answer: each is looked for after each token
# Our settings by their names in a request.
SETTINGS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed"}
SETTINGS |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}


def routes(writer: Writer) -> list[Route]:
    def check_key(request: Request) -> None:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {writer.token}".encode()):
            raise HTTPException(401, "this is not the API key of this server; it printed the key when it started")

    async def models(request: Request) -> Response:
        check_key(request)
        model = {"id": writer.trained.name, "object": "model", "created": 0, "owned_by": "deskgpt"}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(request: Request) -> Response:
        check_key(request)
        asked = {name: value for name, value in (await json_object(request)).items() if value is not None}
        chosen = {setting: asked[name] for name, setting in SETTINGS.items() if name in asked}
        config = replace(writer.defaults, **{"seed": secrets.randbelow(2**32)} | chosen)
        is_chat = request.url.path == CHAT
        text, ids = await run_in_threadpool(begin, writer, asked, is_chat)
        reply = Reply(writer.trained.name, text, ids, is_chat)
        written = writer.engine.write(ids, [text], config)
        if asked.get("stream"):
            return StreamingResponse(stream(request, reply.chunks(written)), media_type="text/event-stream")
        async with writer.turn:
            async for event in in_threads(request, written):
                if isinstance(event, dict):  # an error
                    return JSONResponse(event, 500)
                if await request.is_disconnected():
                    break
        return JSONResponse(reply.full())

    async def stream(request: Request, chunks: Iterator[dict[str, Any]]) -> AsyncIterator[str]:
        async with writer.turn:
            async for event in in_threads(request, chunks):
                yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    completions = [Route(path, complete, methods=["POST"]) for path in ("/v1/completions", CHAT)]
    return [Route("/v1/models", models), *completions]


def begin(writer: Writer, asked: dict[str, Any], is_chat: bool) -> tuple[Sample, Tensor]:
    """Return the text to write and its prompt (1, T). Raises ValueError, one line."""
    stops = asked.get("stop", writer.defaults.stop)
    stops = stops if isinstance(stops, list) else [stops]
    if len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop={shortened(stops)} must be a text or a list of at most {MOST_STOPS} texts")
    if is_chat:
        return writer.begin(None, asked.get("messages", []), *stops)
    prompt = asked.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    return writer.begin(prompt, None, *stops)


class Reply:
    """The reply to one request: one with the full text, or chunks of it."""

    def __init__(self, model: str, text: Sample, ids: Tensor, is_chat: bool) -> None:
        """ids: the prompt (1, T)."""
        self.text = text
        self.n_prompt = ids.size(1)
        self.is_chat = is_chat
        self.fields = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def full(self) -> dict[str, Any]:
        new = self.text.text[self.text.prompt_end :]
        content = {"message": {"role": "assistant", "content": new}} if self.is_chat else {"text": new}
        return self.part("chat.completion", content, is_last=True)

    def chunks(self, written: Iterator[list[str]]) -> Iterator[dict[str, Any]]:
        """Yield the text as it grows, a part for each token."""
        kind = "chat.completion.chunk"
        if self.is_chat:
            yield self.part(kind, {"delta": {"role": "assistant", "content": ""}})
        for (new,) in written:
            yield self.part(kind, {"delta": {"content": new}} if self.is_chat else {"text": new})
        yield self.part(kind, {"delta": {}} if self.is_chat else {"text": ""}, is_last=True)

    def part(self, kind: str, content: dict[str, Any], is_last: bool = False) -> dict[str, Any]:
        n_new = len(self.text.tokens)
        usage = {"prompt_tokens": self.n_prompt, "completion_tokens": n_new, "total_tokens": self.n_prompt + n_new}
        reason = "stop" if self.text.done else "length"
        return self.fields | {
            "object": kind if self.is_chat else "text_completion",
            "choices": [content | {"index": 0, "logprobs": None, "finish_reason": reason if is_last else None}],
            "usage": usage if is_last else None,
        }
