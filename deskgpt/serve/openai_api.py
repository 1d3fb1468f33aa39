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
from dataclasses import dataclass, replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from deskgpt.compute.generation import GenerationConfig, Sample, write
from deskgpt.serve.server import in_threads, json_object
from deskgpt.serve.writer import Writer
from deskgpt.system.terminal import shortened

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
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
        completion = begin(writer, asked, is_chat=request.url.path == CHAT)
        return await respond(request, writer, asked, completion)

    completions = [Route(path, complete, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
    return [Route("/v1/models", models), *completions]


@dataclass
class Completion:
    """A text to write, and the form of its replies."""

    text: Sample
    ids: Tensor  # (1, T) the prompt
    head: dict[str, Any]  # of all replies
    is_chat: bool

    def whole(self) -> dict[str, Any]:
        """The reply with all of the text."""
        new = self.text.text[self.text.prompt_end :]
        content = {"message": {"role": "assistant", "content": new}} if self.is_chat else {"text": new}
        return self.head | {"choices": [self.choice(content, self.end())], "usage": self.usage()}

    def pieces(self, shown: Iterator[list[str]], with_usage: bool) -> Iterator[dict[str, Any] | None]:
        """The replies with the text as it grows; None for a token that shows nothing."""
        head = self.head
        if self.is_chat:
            head = head | {"object": "chat.completion.chunk"}
            yield head | {"choices": [self.choice({"delta": {"role": "assistant", "content": ""}})]}
        for (new,) in shown:
            content = {"delta": {"content": new}} if self.is_chat else {"text": new}
            yield head | {"choices": [self.choice(content)]} if new else None
        nothing: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        yield head | {"choices": [self.choice(nothing, self.end())]}
        if with_usage:
            yield head | {"choices": [], "usage": self.usage()}

    def choice(self, content: dict[str, Any], end: str | None = None) -> dict[str, Any]:
        return content | {"index": 0, "logprobs": None, "finish_reason": end}

    def end(self) -> str:
        return "stop" if self.text.done else "length"

    def usage(self) -> dict[str, int]:
        before, new = self.ids.size(1), self.text.n_tokens
        return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


async def respond(request: Request, writer: Writer, asked: dict[str, Any], completion: Completion) -> Response:
    """Writes the text. It ends when its reader has gone."""
    config = generation_config(asked, writer.defaults)
    shown = write(writer.trained.model, completion.ids, [completion.text], config, writer.replacing)
    if checked(asked.get("stream", False), bool, "stream"):
        options = checked(asked.get("stream_options", {}), dict, "stream_options")
        pieces = completion.pieces(shown, bool(options.get("include_usage")))

        async def stream() -> AsyncIterator[str]:
            async with writer.turn:
                async for event in in_threads(request, pieces):
                    if event is not None:
                        yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")
    async with writer.turn:
        async for event in in_threads(request, shown):
            if isinstance(event, dict):  # an error
                return JSONResponse(event, 500)
            if await request.is_disconnected():
                break
    return JSONResponse(completion.whole())


# ---- what a request asks for: each raises ValueError, one line -----------------------------------------------


def begin(writer: Writer, asked: dict[str, Any], is_chat: bool) -> Completion:
    stops = asked.get("stop", writer.defaults.stop)
    stops = [stops] if isinstance(stops, str) else checked(stops, list, "stop")
    stops = [checked(stop, str, "stop") for stop in stops]
    if is_chat:
        text, ids = writer.begin(Sample, "", checked(asked.get("messages"), list, "messages"), *stops)
    else:
        prompt = asked.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        text, ids = writer.begin(Sample, checked(prompt, str, "prompt"), None, *stops)
    head = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": writer.trained.name,
    }
    return Completion(text, ids, head, is_chat)


def generation_config(asked: dict[str, Any], defaults: GenerationConfig) -> GenerationConfig:
    if asked.get("n", 1) != 1:
        raise ValueError(f"n={shortened(asked['n'])} must be 1; ask again for another text, with another seed")
    chosen = {setting: asked[name] for name, setting in SETTINGS.items() if name in asked}
    return replace(defaults, **{"seed": secrets.randbelow(2**32)} | chosen)


def checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        names = {bool: "true or false", dict: "an object", list: "a list", str: "a text"}
        raise ValueError(f"{name}={shortened(value)} must be {names[kind]}")
    return value
