"""The playground: the page of `python sample.py --serve`, which shows what a model writes, token by token.

With a model that answers, the page is a chat.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deskgpt.compute.generation import GenerationConfig, Sample, Tokenizer, write
from deskgpt.serve import page_server
from deskgpt.serve.page_server import Events
from deskgpt.system.formatting import shortened
from model import GPT

Text = TypeVar("Text", bound=Sample)

# A whole number where the limits are whole numbers.
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2000),
    "temperature": (0.0, 100.0),
    "top_k": (0, 1_000_000),
    "top_p": (1e-6, 1.0),
    "seed": (0, 2**53 - 1),  # the browser's numbers are exact up to here
}
# JSON may write a character as 12 bytes: these are fewer than the server's MOST_BODY_BYTES.
MOST_CHARS = {"prompt": 100_000, "stop": 1000}
ALTERNATIVES = 8  # likeliest tokens that are shown next to the drawn one

CONTENT_TYPES = {
    "playground.html": "text/html; charset=utf-8",
    "playground.css": "text/css; charset=utf-8",
    "playground.js": "text/javascript; charset=utf-8",
}


# ---- what the page asks for ----------------------------------------------------------------------------------


def check(wish: GenerationConfig) -> None:
    """Raises ValueError, one line, for what is out of range, or of another type in a request."""
    for name, (low, high) in RANGES.items():
        check_number(name, getattr(wish, name), low, high)
    for name in MOST_CHARS:
        check_text(name, getattr(wish, name))


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, type(high)) or not low <= value <= high:  # nan is not
        raise ValueError(f"{name}={shortened(value)} must be a number from {low:,} to {high:,}")


def check_text(name: str, text: Any) -> None:
    most = MOST_CHARS[name]
    if not isinstance(text, str) or len(text) > most or any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"{name}={shortened(text)} must be UTF-8 text of at most {most:,} characters")


# ---- a text and its tokens -----------------------------------------------------------------------------------


class TokenInfo(NamedTuple):
    """A token and where its text was when it was drawn."""

    begin: int
    end: int
    about: dict[str, Any]


class StreamedText(Sample):
    """A text that describes its tokens. It holds each back while its text may become a stop text."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, *stops: str, last_token: int | None = None) -> None:
        super().__init__(tokenizer, prompt, *stops, last_token=last_token)
        self.p = torch.empty(0)  # of the next token (V,)
        self.waiting: list[TokenInfo] = []
        self.told = len(prompt)  # characters
        self.n_told = 0  # tokens

    def watch(self, logits: Tensor) -> None:
        self.p = logits[0].cpu().double().softmax(0)

    def add(self, token: int) -> str:
        begin = len(self.text)
        shown = super().add(token)
        self.waiting.append(TokenInfo(begin, len(self.text), self.describe(token)))
        return shown

    def final(self) -> Iterator[dict[str, Any]]:
        """The tokens whose text is final now. The stop text is cut off with what follows it."""
        while self.waiting:
            begin, end, about = self.waiting[0]
            if begin >= len(self.text) if self.done else end > self.shown:
                return
            del self.waiting[0]
            self.told = end
            self.n_told += 1
            yield about | {"text": self.text[begin:end]}

    def describe(self, token: int) -> dict[str, Any]:
        """The drawn token and the likeliest ones in its place, by their probabilities."""
        p = self.p
        if not p.isfinite().all():
            raise ValueError("the model's output is NaN, which gives no text; try --dtype=float32")
        likeliest = p.topk(min(ALTERNATIVES, len(p)))
        top = dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        shown = top | {token: p[token].item()}
        return {
            "id": token,
            "name": self.name_of(token),
            "p": shown[token],
            "rank": int((p > p[token]).sum()) + 1,
            "top": [{"id": i, "name": self.name_of(i), "p": value} for i, value in top.items()],
            "rest": max(0.0, 1 - math.fsum(shown.values())),
        }

    def name_of(self, token: int) -> str:
        """A token as people read it: its text in quotes, or the bytes of one that is no whole character."""
        content = self.tokenizer.decode_bytes([token])
        try:
            return repr(content.decode("utf-8"))
        except UnicodeDecodeError:
            return f"bytes {content.hex(' ').upper()}"


# ---- the page ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """How a model answers."""

    encode: Callable[[Any], Tensor]  # of messages in JSON, the tokens (1, T) that the answer continues; or ValueError
    end_of_text: int  # the token with which an answer ends
    next_turn: str  # with which the model would begin the user's next turn
    system: str  # with what the page's dialogue begins


@dataclass
class Playground(page_server.Page):
    """The page with its model, filled with the settings `first`."""

    name: str
    facts: list[str]  # shown under the name
    model: GPT
    tokenizer: Tokenizer
    encode: Callable[[str], Tensor]  # the prompt's token ids (1, T); raises ValueError for characters without a token
    replacing: Callable[[], AbstractContextManager[None]]  # the way in which the model computes: Reading.using
    first: GenerationConfig
    chat: Chat | None = None  # of a model that answers
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    turn: Any = field(default_factory=threading.Lock)  # held by the text that is being written

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        if place == "page.json":
            return "application/json", json.dumps(self.description()).encode()
        name = place or "playground.html"
        if name not in CONTENT_TYPES:
            return None
        return CONTENT_TYPES[name], Path(__file__).with_name(name).read_bytes()

    def description(self) -> dict[str, Any]:
        """What the page is filled with."""
        return {
            "name": self.name,
            "facts": self.facts,
            "settings": asdict(self.first),
            "ranges": RANGES,
            "most_chars": MOST_CHARS,
            "system": self.chat.system if self.chat else None,
        }

    def post(self, place: str, body: bytes) -> tuple[str, Events] | None:
        if place != "write":
            return None
        asked = page_server.json_object(body)
        messages = asked.pop("messages", None)
        try:
            wish = GenerationConfig(**asked)
        except TypeError:
            raise ValueError("the request is not a JSON object of the page's settings") from None
        check(wish)
        text, ids = self.begin(StreamedText, wish.prompt, messages, wish.stop)
        return "application/x-ndjson", self.told(wish, text, ids)

    def begin(self, kind: type[Text], prompt: str, messages: Any, *stops: str) -> tuple[Text, Tensor]:
        """A text that answers messages in JSON, or continues the prompt if there are none; the tokens (1, T) before it.

        Raises ValueError, one line.
        """
        if messages is None:
            if not prompt:
                raise ValueError("the prompt is empty; send some text or a line break")
            ids = self.encode(prompt)
            text = kind(self.tokenizer, prompt, *stops)
        elif self.chat is not None:
            ids = self.chat.encode(messages)
            text = kind(self.tokenizer, "", *stops, self.chat.next_turn, last_token=self.chat.end_of_text)
        else:
            raise ValueError(f"{self.name} saw no chat data (docs/chat.md); send a prompt, or serve it with --chat")
        return text, ids.to(next(self.model.parameters()).device)

    def told(self, wish: GenerationConfig, text: StreamedText, ids: Tensor) -> Events:
        """What the page shows of a text: the prompt's length, then each token once its text is final, then the end."""
        yield {"prompt_tokens": ids.size(1), "block_size": self.model.config.block_size}
        with self.turn, self.replacing():
            t0 = time.perf_counter()
            for _ in write(self.model, ids, [text], wish, text.watch):
                yield from text.final()
            seconds = time.perf_counter() - t0
        yield {
            "end": "stop" if text.done else "length",
            "text": text.text[text.told :],  # a sign for bytes that are no whole character
            "tokens_per_s": text.n_told / seconds,
        }
