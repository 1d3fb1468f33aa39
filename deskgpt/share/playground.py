"""The playground: the page of `python sample.py --serve`, which shows what models write, token by token."""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from deskgpt.compute.writing import Sample, Tokenizer, Wish, write
from deskgpt.machine.words import shortened
from deskgpt.share import page_server
from deskgpt.share.page_server import Events
from model import GPT

MOST_PROMPT_CHARS = 100_000  # which JSON may write as 12 bytes each: fewer than the server's MOST_BODY_BYTES
MOST_STOP_CHARS = 1000
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2000),
    "temperature": (0, 100),
    "top_k": (0, 1_000_000),
    "top_p": (1e-6, 1),
    "seed": (0, 2**53 - 1),  # the browser's numbers are exact up to here
}
ALTERNATIVES = 8  # likeliest tokens that are shown next to the drawn one

FILES = {
    "": ("playground.html", "text/html; charset=utf-8"),
    "playground.css": ("playground.css", "text/css; charset=utf-8"),
    "playground.js": ("playground.js", "text/javascript; charset=utf-8"),
}


# ---- what the page asks for ----------------------------------------------------------------------------------


def check(wish: Wish) -> None:
    """Raises ValueError, one line, for what is out of range."""
    for name, (low, high) in RANGES.items():
        value = getattr(wish, name)
        if not low <= value <= high:  # nan is not
            raise ValueError(f"{name}={shortened(value)} must be from {low:,} to {high:,}")
    if not wish.prompt:
        raise ValueError("the prompt is empty; type some text or a line break")
    for name, most in (("prompt", MOST_PROMPT_CHARS), ("stop", MOST_STOP_CHARS)):
        text = getattr(wish, name)
        if len(text) > most:
            raise ValueError(f"{name} has {len(text):,} characters, at most {most:,} are allowed; shorten it")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"{name} is not UTF-8 text: it holds half of a character")


def parsed(body: bytes, n_models: int) -> tuple[int, Wish]:
    """(which of the models, what it should write) from the JSON of a request. Raises ValueError, one line."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the request is not JSON") from None
    kinds = get_type_hints(Wish) | {"model": int}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ValueError(f"the request is not a JSON object of {', '.join(kinds)}")
    for name, kind in kinds.items():
        is_whole = type(values[name]) is int and kind is float
        if type(values[name]) is not kind and not is_whole:
            wanted = {str: "text", int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"{name}={shortened(values[name])} is not {wanted}")
    model = values.pop("model")
    if not 0 <= model < n_models:
        raise ValueError(f"model={shortened(model)} must be below {n_models}")
    wish = Wish(**values)
    check(wish)
    return model, wish


# ---- writing -------------------------------------------------------------------------------------------------


@dataclass
class Player:
    """A model on the page."""

    name: str
    facts: list[str]  # shown under the name
    model: GPT
    tokenizer: Tokenizer
    encode: Callable[[str], Tensor]  # the prompt's token ids (1, T); raises ValueError for characters without a token
    using: Callable[[], AbstractContextManager[None]]  # the way in which the model computes: Reading.using

    def write(self, wish: Wish, ids: Tensor, turn: threading.Lock) -> Events:
        """What the page shows of a text: the prompt's length, then each token once its text is final, then the end.

        Models and texts take turns: `turn` is held while a token is computed. On CUDA nothing else may run while a step
        is recorded as a graph.
        """

        @contextmanager
        def in_turn() -> Iterator[None]:
            with turn, self.using():
                yield

        yield {"prompt_tokens": ids.size(1), "block_size": self.model.config.block_size}
        text = Told(self, wish)
        t0 = time.perf_counter()
        with turn:
            ids = ids.to(next(self.model.parameters()).device)
        for _ in write(self.model, ids, [text], wish, text.watch, in_turn):
            yield from text.final()
        yield {
            "end": "stop" if text.done else "length",
            "text": text.text[text.told :],  # a sign for bytes that are no whole character
            "tokens_per_s": text.n_tokens / (time.perf_counter() - t0),
        }

    def describe(self, token: int, p: Tensor) -> dict[str, Any]:
        """A token and the likeliest ones in its place, by their probabilities p (V,)."""
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


class Drawn(NamedTuple):
    """A token and where its text was when it was drawn."""

    begin: int
    end: int
    about: dict[str, Any]


class Told(Sample):
    """A text that describes its tokens. It holds each back while its text may become the stop text."""

    def __init__(self, player: Player, wish: Wish) -> None:
        super().__init__(player.tokenizer, wish.prompt, wish.stop)
        self.player = player
        self.p = torch.empty(0)  # of the next token (V,)
        self.waiting: list[Drawn] = []
        self.told = len(wish.prompt)  # characters
        self.n_tokens = 0

    def watch(self, logits: Tensor) -> None:
        self.p = logits[0].cpu().double().softmax(0)

    def add(self, token: int) -> str:
        begin = len(self.text)
        shown = super().add(token)
        self.waiting.append(Drawn(begin, len(self.text), self.player.describe(token, self.p)))
        return shown

    def final(self) -> Iterator[dict[str, Any]]:
        """The tokens whose text is final now. The stop text is cut off with what follows it."""
        while self.waiting:
            begin, end, about = self.waiting[0]
            if begin >= len(self.text) if self.done else end > self.shown:
                return
            del self.waiting[0]
            self.told = end
            self.n_tokens += 1
            yield about | {"text": self.text[begin:end]}


# ---- the page ------------------------------------------------------------------------------------------------


class Playground(page_server.Page):
    """The page with its models, filled with the settings `first`."""

    def __init__(self, players: list[Player], first: Wish) -> None:
        self.players = players
        self.first = first
        self.token = secrets.token_urlsafe(24)
        self.turn = threading.Lock()
        folder = Path(__file__).parent
        self.files = {place: (kind, (folder / name).read_bytes()) for place, (name, kind) in FILES.items()}

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        if place == "page.json":
            return "application/json", json.dumps(self.description()).encode()
        return self.files.get(place)

    def description(self) -> dict[str, Any]:
        """What the page is filled with."""
        return {
            "models": [{"name": player.name, "facts": player.facts} for player in self.players],
            "settings": asdict(self.first),
            "ranges": RANGES,
            "most_prompt_chars": MOST_PROMPT_CHARS,
        }

    def post(self, place: str, body: bytes) -> Events | None:
        if place != "write":
            return None
        model, wish = parsed(body, len(self.players))
        player = self.players[model]
        return player.write(wish, player.encode(wish.prompt), self.turn)
