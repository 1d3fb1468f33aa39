"""The playground: a page in this machine's browser that shows what models write, token by token.

`python sample.py --serve` opens it. The server listens on 127.0.0.1 alone. It answers only requests whose address
begins with a random token, which the printed URL holds, and writes no files.
"""

from __future__ import annotations

import errno
import hmac
import json
import math
import os
import secrets
import select
import socket
import socketserver
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from deskgpt.machine.errors import message_for_user
from deskgpt.machine.words import shortened
from model import GPT

MOST_PROMPT_CHARS = 100_000
MOST_STOP_CHARS = 1000
MOST_BODY_BYTES = 2_000_000  # JSON may write a character as 12 bytes
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2000),
    "temperature": (0, 100),
    "top_k": (0, 1_000_000),
    "top_p": (1e-6, 1),
    "seed": (0, 2**53 - 1),  # the browser's numbers are exact up to here
}
ALTERNATIVES = 8  # likeliest tokens that are shown next to the drawn one
BUSY_S = 5.0  # the wait for a text that is being written: one that was stopped ends at its next token
SILENT_S = 30.0  # a connection on which nothing moves for this long is closed

FILES = {
    "": ("playground.html", "text/html; charset=utf-8"),
    "playground.css": ("playground.css", "text/css; charset=utf-8"),
    "playground.js": ("playground.js", "text/javascript; charset=utf-8"),
}
# Together with the token: no other page can read, embed or post to this one, and it can ask no other host.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


# ---- what the page asks for ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The text that the page asks for. Raises ValueError, one line, for what is out of range."""

    prompt: str
    stop: str
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={shortened(value)} must be from {low:,} to {high:,}")
        if not self.prompt:
            raise ValueError("the prompt is empty; type some text or a line break")
        for name, most in (("prompt", MOST_PROMPT_CHARS), ("stop", MOST_STOP_CHARS)):
            text = getattr(self, name)
            if len(text) > most:
                raise ValueError(f"{name} has {len(text):,} characters, at most {most:,} are allowed; shorten it")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError(f"{name} is not UTF-8 text: it holds half of a character")


def parsed(body: bytes, models: int) -> tuple[int, Wish]:
    """(which of the models, what it should write) from the JSON of a request. Raises ValueError, one line."""
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError):
        raise ValueError("the request is not JSON in UTF-8") from None
    if not isinstance(values, dict):
        raise ValueError("the request is not a JSON object")
    kinds = get_type_hints(Wish) | {"model": int}
    for name in values:
        if name not in kinds:
            raise ValueError(f"{shortened(name)} is not a setting; these are: {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in values:
            raise ValueError(f"{name} is missing")
        is_whole = type(values[name]) is int and kind is float
        if type(values[name]) is not kind and not is_whole:
            wanted = {str: "text", int: "a whole number", float: "a number"}[kind]
            raise ValueError(f"{name}={shortened(values[name])} is not {wanted}")
    model = values.pop("model")
    if not 0 <= model < models:
        raise ValueError(f"model={shortened(model)} must be below {models}")
    return model, Wish(**values)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# ---- writing -------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """What the playground needs of a data/tokenizer.py's Tokenizer."""

    vocab_size: int

    def encode_prompt(self, text: str) -> Any: ...

    def decode_bytes(self, ids: list[int]) -> bytes: ...


class Growing(Protocol):
    """What the playground needs of a sample.py's Sample."""

    text: str  # prompt included
    shown: int  # characters of it that cannot become the stop text any more
    done: bool

    def add(self, token: int) -> str: ...

    def finish(self) -> str: ...


@dataclass
class Player:
    """A model on the page."""

    name: str
    facts: list[str]  # shown under the name
    model: GPT
    tokenizer: Tokenizer
    grow: Callable[[str, str], Growing]  # from the prompt and the stop text
    using: Callable[[], AbstractContextManager[None]]  # the way in which the model computes: Reading.using
    busy: threading.Lock = field(default_factory=threading.Lock)  # held while it writes

    def encode(self, prompt: str) -> Tensor:
        """Token ids (1, T). Raises ValueError for characters without a token."""
        ids = self.tokenizer.encode_prompt(prompt).astype("int64")
        known = self.model.config.vocab_size
        if ids.max() >= known:
            raise ValueError(f"the prompt has token {ids.max()}, the model only {known} tokens")
        return torch.from_numpy(ids)[None]

    def write(self, wish: Wish, ids: Tensor, turn: threading.Lock) -> Generator[list[dict[str, Any]]]:
        """Yields, after each token drawn, the tokens whose text is final: not while it may become the stop text.

        The last list ends with why the text ends. Models take turns: `turn` is held while a token is computed. On
        CUDA nothing else may run while a step is recorded as a graph.
        """
        text = self.grow(wish.prompt, wish.stop)
        waiting: list[tuple[int, int, dict[str, Any]]] = []  # where a token's text begins and ends, and the token
        p = torch.empty(0)

        def watch(logits: Tensor) -> None:
            nonlocal p
            p = logits[0].cpu().double().softmax(0)  # (V,)

        with turn:
            ids = ids.to(next(self.model.parameters()).device)
        drawn = self.model.generate(
            ids,
            wish.max_new_tokens,
            temperature=wish.temperature,
            top_k=wish.top_k or None,
            top_p=wish.top_p,
            seed=wish.seed,
            vocab_size=self.tokenizer.vocab_size,
            watch=watch,
        )
        while not text.done:
            with turn, self.using():
                new = next(drawn, None)
                token = None if new is None else int(new)
            if token is None:
                break
            begin = len(text.text)
            text.add(token)
            waiting.append((begin, len(text.text), self.describe(token, p)))
            ready = [] if text.done else [t for t in waiting if t[1] <= text.shown]
            waiting = waiting[len(ready) :]
            yield [about | {"text": text.text[begin:end]} for begin, end, about in ready]

        if text.done:  # the stop text and what follows it are cut off
            waiting = [t for t in waiting if t[0] < len(text.text)]
        last: list[dict[str, Any]] = [about | {"text": text.text[begin:end]} for begin, end, about in waiting]
        before = len(text.text)
        text.finish()
        rest = text.text[before:]  # the sign for bytes that are no whole character
        yield [*last, {"end": "stop" if text.done else "length", "text": rest}]

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


# ---- serving -------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """The page and its models, for whoever knows the token. Raises OSError, one line, if the port cannot be had."""

    allow_reuse_address = os.name == "posix"  # on Windows it would let two servers have one port

    def __init__(self, players: list[Player], first: Wish, port: int) -> None:
        self.players = players
        self.first = first
        self.token = secrets.token_urlsafe(24)
        self.turn = threading.Lock()
        self.ending = threading.Event()
        folder = Path(__file__).parent
        self.files = {place: ((folder / name).read_bytes(), kind) for place, (name, kind) in FILES.items()}
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as e:
            reason = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be had ({e.strerror})"
            raise OSError(f"port={port} {reason}; try another, or --port=0 for one that is free") from None
        port = self.server_address[1]
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self.url = f"http://127.0.0.1:{port}/{self.token}/"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks the network for this machine's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # the browser may go at any time
            super().handle_error(request, client_address)

    def description(self) -> dict[str, Any]:
        """What the page is filled with."""
        return {
            "models": [{"name": player.name, "facts": player.facts} for player in self.players],
            "settings": asdict(self.first),
            "ranges": RANGES,
            "most_prompt_chars": MOST_PROMPT_CHARS,
        }


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SILENT_S
    default_request_version = "HTTP/1.0"  # malformed requests get a status and HEADERS too
    disable_nagle_algorithm = True  # each token goes out at once

    def do_GET(self) -> None:
        place = self.place()
        if place == "page.json":
            self.reply(200, "application/json", json.dumps(self.server.description()).encode())
        elif place in self.server.files:
            content, kind = self.server.files[place]
            self.reply(200, kind, content)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        if self.place() != "write":
            self.send_error(404)
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            self.send_error(411, "the request has no Content-Length")
            return
        if int(length) > MOST_BODY_BYTES:
            self.send_error(413, f"the request has {int(length):,} bytes, at most {MOST_BODY_BYTES:,} are allowed")
            return
        try:
            model, wish = parsed(self.rfile.read(int(length)), len(self.server.players))
            player = self.server.players[model]
            ids = player.encode(wish.prompt)
        except ValueError as e:
            self.send_error(400, str(e))
            return
        if not player.busy.acquire(timeout=BUSY_S):
            self.send_error(503, f"{player.name} is busy with another text; try again when that is done")
            return
        try:
            self.stream(player, wish, ids)
        finally:
            player.busy.release()

    def place(self) -> str | None:
        """What is asked for, as a path below the token; None without the token, or under another host's name.

        Another name means that a foreign page had its own name point to this machine (DNS rebinding).
        """
        token, _, place = self.path.removeprefix("/").partition("/")
        knows_token = hmac.compare_digest(token.encode("latin-1"), self.server.token.encode())
        hosts = self.headers.get_all("Host", [])
        return place if knows_token and len(hosts) == 1 and hosts[0] in self.server.hosts else None

    def stream(self, player: Player, wish: Wish, ids: Tensor) -> None:
        """The text as lines of JSON: the prompt's length, each token, why it ended. Stops when the client has gone."""
        self.begin_reply(200, "application/x-ndjson")
        self.send_line({"prompt_tokens": ids.size(1), "block_size": player.model.config.block_size})
        begun = time.perf_counter()
        n_tokens = 0
        try:
            with closing(player.write(wish, ids, self.server.turn)) as steps:
                while not self.server.ending.is_set() and not self.client_has_gone():
                    events = next(steps, None)
                    if events is None:
                        return
                    for event in events:
                        n_tokens += "id" in event
                        if "end" in event:
                            event["tokens_per_s"] = n_tokens / (time.perf_counter() - begun)
                        self.send_line(event)
        except (ValueError, RuntimeError, MemoryError) as e:
            message = message_for_user(e, "ask for fewer tokens or a shorter prompt")
            self.send_line({"error": message or "a defect; the terminal shows where"})
            if message is None:
                raise
        if self.server.ending.is_set():
            self.send_line({"error": "the server was stopped"})

    def client_has_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def send_line(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event, allow_nan=False).encode() + b"\n")

    def begin_reply(self, status: int, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def reply(self, status: int, kind: str, content: bytes) -> None:
        self.begin_reply(status, kind, len(content))
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors are one line, as JSON; http.server's own ones too, of malformed requests and other methods."""
        line = message or "there is nothing here"
        self.reply(code, "application/json", json.dumps({"error": line}).encode())

    def version_string(self) -> str:
        return "deskGPT"

    def log_message(self, format: str, *args: Any) -> None:
        pass  # the terminal stays quiet


def serve(players: list[Player], first: Wish, port: int) -> None:
    """Runs the page, filled with the settings `first`, until Ctrl+C. Raises OSError if the port cannot be had."""
    with Server(players, first, port) as server:
        print(f"the playground, until Ctrl+C: {server.url}", flush=True)
        try:
            if has_browser():
                with suppress(webbrowser.Error, OSError):
                    webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            print("the playground is closed")
        finally:
            server.ending.set()
            for player in players:  # what is being written ends at its next token
                player.busy.acquire(timeout=BUSY_S)


def has_browser() -> bool:
    """Whether a person sits at this machine, in front of a graphical desktop."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(v) for v in ("DISPLAY", "WAYLAND_DISPLAY"))
