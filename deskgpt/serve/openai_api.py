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
from dataclasses import dataclass, field, replace
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
        config = generation_config(asked, writer.defaults)
        shown = write(writer.trained.model, completion.ids, [completion.text], config, writer.replacing)
        if checked(asked.get("stream", False), bool, "stream"):
            return StreamingResponse(stream(request, completion, shown), media_type="text/event-stream")
        async with writer.turn:
            async for event in in_threads(request, shown):
                if isinstance(event, dict):  # an error
                    return JSONResponse(event, 500)
                if await request.is_disconnected():  # whoever asked has gone: the text ends here
                    break
        return JSONResponse(completion.whole())

    async def stream(request: Request, completion: Completion, shown: Iterator[list[str]]) -> AsyncIterator[str]:
        async with writer.turn:
            async for event in in_threads(request, completion.chunks(shown)):
                if event is not None:
                    yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    completions = [Route(path, complete, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
    return [Route("/v1/models", models), *completions]


@dataclass
class Completion:
    """A text to write, and the form of its replies."""

    text: Sample
    ids: Tensor  # (1, T) the prompt
    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """The reply with all of the text."""
        new = self.text.text[self.text.prompt_end :]
        content = {"message": {"role": "assistant", "content": new}} if self.is_chat else {"text": new}
        return self.reply("chat.completion", content, is_last=True)

    def chunks(self, shown: Iterator[list[str]]) -> Iterator[dict[str, Any] | None]:
        """The replies with the text as it grows; None for a token that shows nothing."""
        kind = "chat.completion.chunk"
        if self.is_chat:
            yield self.reply(kind, {"delta": {"role": "assistant", "content": ""}})
        for (new,) in shown:
            content = {"delta": {"content": new}} if self.is_chat else {"text": new}
            yield self.reply(kind, content) if new else None
        yield self.reply(kind, {"delta": {}} if self.is_chat else {"text": ""}, is_last=True)

    def reply(self, kind: str, content: dict[str, Any], is_last: bool = False) -> dict[str, Any]:
        n_prompt, n_new = self.ids.size(1), self.text.n_tokens
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
        reason = "stop" if self.text.done else "length"
        return {
            "id": self.id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [content | {"index": 0, "logprobs": None, "finish_reason": reason if is_last else None}],
            "usage": usage if is_last else None,
        }


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
    return Completion(text, ids, writer.trained.name, is_chat)


def generation_config(asked: dict[str, Any], defaults: GenerationConfig) -> GenerationConfig:
    if asked.get("n", 1) != 1:
        raise ValueError(f"n={shortened(asked['n'])} must be 1; ask again for another text, with another seed")
    chosen = {setting: asked[name] for name, setting in SETTINGS.items() if name in asked}
    return replace(defaults, **{"seed": secrets.randbelow(2**32)} | chosen)


def checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        names = {bool: "true or false", list: "a list", str: "a text"}
        raise ValueError(f"{name}={shortened(value)} must be {names[kind]}")
    return value
