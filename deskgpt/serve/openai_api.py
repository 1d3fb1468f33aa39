"""OpenAI's API for the model of a page, so that programs made for that API can use it.

GET /v1/models, POST /v1/completions and, with a model that answers, /v1/chat/completions, streamed or not. What a
request leaves out is as in the page's settings, but for the seed, which is then drawn. Other fields are ignored. What
fields mean: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import replace
from typing import Any

from torch import Tensor

from deskgpt.compute.generation import GenerationConfig, Sample, write
from deskgpt.serve.page_server import Events, json_object
from deskgpt.serve.playground import MOST_CHARS, RANGES, Playground, check_number, check_text
from deskgpt.system.formatting import shortened

COMPLETIONS = "v1/completions"
CHAT = "v1/chat/completions"
# Our settings by their names in a request. Some programs ask for very many tokens, so as not to set a limit.
SETTINGS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed"}
SETTINGS |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
LIMITS = RANGES | {"max_new_tokens": (1, 1_000_000)}


class Api(Playground):
    """The page, and the API beside it."""

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        if place != "v1/models":
            return super().get(place, query)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "deskgpt"}
        return "application/json", json.dumps({"object": "list", "data": [model]}).encode()

    def post(self, place: str, body: bytes) -> tuple[str, Events] | None:
        if place not in (COMPLETIONS, CHAT):
            return super().post(place, body)
        asked = {name: value for name, value in json_object(body).items() if value is not None}
        if asked.get("n", 1) != 1:
            raise ValueError(f"n={shortened(asked['n'])} must be 1; ask again for another text, with another seed")
        wish = wish_of(asked, self.first)
        stops = stops_of(asked.get("stop", self.first.stop))
        if place == CHAT:
            text, ids = self.begin(Sample, "", messages_of(asked.get("messages")), *stops)
        else:
            prompt = prompt_of(asked.get("prompt"))
            text, ids = self.begin(Sample, prompt, None, *stops)
        head = {
            "id": f"{'chatcmpl' if place == CHAT else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if place == CHAT else "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        if not checked(asked.get("stream", False), bool, "stream"):
            return "application/json", self.whole(head, place == CHAT, wish, text, ids)
        options = checked(asked.get("stream_options", {}), dict, "stream_options")
        with_usage = bool(options.get("include_usage"))
        return "text/event-stream", self.pieces(head, place == CHAT, wish, text, ids, with_usage)

    def whole(self, head: dict[str, Any], is_chat: bool, wish: GenerationConfig, text: Sample, ids: Tensor) -> Events:
        """The reply with all of the text."""
        with self.turn, self.replacing():
            for _ in write(self.model, ids, [text], wish):
                yield None
        new = text.text[text.prompt_end :]
        content = {"message": {"role": "assistant", "content": new}} if is_chat else {"text": new}
        yield head | {"choices": [choice(content, end_of(text))], "usage": usage(ids, text)}

    def pieces(
        self, head: dict[str, Any], is_chat: bool, wish: GenerationConfig, text: Sample, ids: Tensor, with_usage: bool
    ) -> Events:
        """The replies with the text as it grows."""
        if is_chat:
            head = head | {"object": "chat.completion.chunk"}
            yield head | {"choices": [choice({"delta": {"role": "assistant", "content": ""}})]}
        with self.turn, self.replacing():
            for (new,) in write(self.model, ids, [text], wish):
                content = {"delta": {"content": new}} if is_chat else {"text": new}
                yield head | {"choices": [choice(content)]} if new else None
        nothing: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        yield head | {"choices": [choice(nothing, end_of(text))]}
        if with_usage:
            yield head | {"choices": [], "usage": usage(ids, text)}
        yield "[DONE]"


# ---- what a request asks for: each raises ValueError, one line -----------------------------------------------


def wish_of(asked: dict[str, Any], first: GenerationConfig) -> GenerationConfig:
    chosen: dict[str, Any] = {"seed": secrets.randbelow(2**32)}
    for name, setting in SETTINGS.items():
        if name in asked:
            check_number(name, asked[name], *LIMITS[setting])
            chosen[setting] = asked[name]
    return replace(first, **chosen)


def prompt_of(value: Any) -> str:
    prompt = value[0] if isinstance(value, list) and len(value) == 1 else value
    check_text("prompt", prompt)
    return prompt


def stops_of(value: Any) -> list[str]:
    stops = checked([value] if isinstance(value, str) else value, list, "stop")
    for stop in stops:
        check_text("stop", stop)
    if sum(map(len, stops)) > MOST_CHARS["stop"]:
        raise ValueError(f"the {len(stops)} texts of stop have more than {MOST_CHARS['stop']:,} characters together")
    return stops


def messages_of(value: Any) -> list[Any]:
    """Messages whose content is one text, also where a program sends it in parts."""
    messages = []
    for message in checked(value, list, "messages"):
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
            messages.append(message | {"content": "".join(part["text"] for part in parts)})
        else:
            messages.append(message)
    return messages


def checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name}={shortened(value)} must be {NAMES[kind]}")
    return value


NAMES = {bool: "true or false", dict: "an object", list: "a list"}


# ---- parts of a reply ----------------------------------------------------------------------------------------


def choice(content: dict[str, Any], end: str | None = None) -> dict[str, Any]:
    return content | {"index": 0, "logprobs": None, "finish_reason": end}


def end_of(text: Sample) -> str:
    return "stop" if text.done else "length"


def usage(prompt: Tensor, text: Sample) -> dict[str, int]:
    """prompt: its tokens (1, T)."""
    before, new = prompt.size(1), text.n_tokens
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}
