"""The page of `python sample.py --serve`, which shows what a model writes, token by token: a playground, or a chat.

All addresses of the page begin with the writer's token. Only what is printed at the start holds it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from torch import Tensor

from data.tokenizer import Tokenizer
from deskgpt.generate.text import GenerationConfig, Sample
from deskgpt.generate.writer import Writer
from deskgpt.serve.server import in_threads, json_object
from deskgpt.system.settings import settings_of
from deskgpt.system.terminal import millions
from model import GPT

ALTERNATIVES = 8  # likeliest tokens that are shown next to the drawn one
PAGE = Path(__file__).with_name("page")


def routes(writer: Writer) -> list[Mount]:
    async def stream(request: Request) -> Response:
        asked = await json_object(request)
        prompt = asked.pop("prompt", None)
        messages = asked.pop("messages", None)
        try:
            config = GenerationConfig(**asked)
        except TypeError:
            raise ValueError("the request is not a JSON object of the page's settings") from None
        text, ids = await run_in_threadpool(writer.begin, prompt, messages, config.stop)

        async def lines() -> AsyncIterator[str]:
            async with writer.turn:
                async for event in in_threads(request, events(writer, config, text, ids)):
                    yield json.dumps(event, allow_nan=False) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def page(request: Request) -> Response:
        return JSONResponse(description(writer))

    files = Mount("/", StaticFiles(directory=PAGE, html=True))
    of_page = [Route("/page.json", page), Route("/write", stream, methods=["POST"]), files]
    return [Mount(f"/{writer.token}", routes=of_page)]


def description(writer: Writer) -> dict[str, Any]:
    """Return what the page is filled with."""
    saved = writer.trained.checkpoint
    n_params = GPT.without_storage(writer.trained.model.config).num_params()  # without copies in 16 bits
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
        "ranges": {name: (s.range.low, s.range.high) for name, s in settings.items() if s.types != (str,)},
        "system": writer.system if writer.chat_template else None,
    }


def events(writer: Writer, config: GenerationConfig, text: Sample, ids: Tensor) -> Iterator[dict[str, Any]]:
    """Yield what the page shows of a text: the prompt's length, each token and what can be shown since, the end.

    A token that is part of a character, or may become part of a stop text, shows nothing until a later one decides.
    """
    p = torch.empty(0)  # probabilities of the next token (V,)

    def watch(logits: Tensor) -> None:
        nonlocal p
        p = logits[0].cpu().double().softmax(0)

    yield {"prompt_tokens": ids.size(1), "block_size": writer.block_size}
    t0 = time.perf_counter()
    n = 0
    for (shown,) in writer.engine.write(ids, [text], config, watch):
        if len(text.tokens) > n:  # the last one is no token, but the rest
            n += 1
            yield describe(text.tokens[-1], p, text.tokenizer) | {"text": shown}
    yield {"end": "stop" if text.done else "length", "text": shown, "tokens_per_s": n / (time.perf_counter() - t0)}


def describe(token: int, p: Tensor, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the drawn token and the likeliest ones in its place, with their probabilities, of p (V,)."""
    if not p.isfinite().all():
        raise ValueError("the model's output is NaN, which gives no text; try --dtype=float32")
    likeliest = p.topk(min(ALTERNATIVES, len(p)))
    top = dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
    listed = top | {token: p[token].item()}
    return {
        "id": token,
        "name": name_of(token, tokenizer),
        "p": listed[token],
        "rank": int((p > p[token]).sum()) + 1,
        "top": [{"id": i, "name": name_of(i, tokenizer), "p": value} for i, value in top.items()],
        "rest": max(0.0, 1 - math.fsum(listed.values())),
    }


def name_of(token: int, tokenizer: Tokenizer) -> str:
    """Return a token for people to read: its text in quotes, or its bytes if they are not whole characters."""
    content = tokenizer.decode_bytes([token])
    try:
        return repr(content.decode("utf-8"))
    except UnicodeDecodeError:
        return f"bytes {content.hex(' ').upper()}"
