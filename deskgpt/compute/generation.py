"""Text from a model, token by token: the loop of sample.py, of its page, and of samples during training."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Protocol

from torch import Tensor

from deskgpt.system.settings import Range, check_fields
from model import GPT


class Tokenizer(Protocol):
    """The part of a tokenizer of data/tokenizer.py that writing needs."""

    vocab_size: int

    def decode_bytes(self, ids: list[int]) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What to write, by the names of sample.py's settings and with their defaults. Raises ConfigError."""

    prompt: str = "\n"
    stop: str = ""  # empty = no stop text
    max_new_tokens: Annotated[int, Range(1, 1_000_000)] = 500
    temperature: Annotated[float, Range(0, 100)] = 0.8
    top_k: Annotated[int, Range(0, 1_000_000)] = 200  # 0 = draw from all tokens
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0
    seed: Annotated[int, Range(0, 2**53 - 1)] = 1337  # the numbers of JSON and browsers are exact up to here

    def __post_init__(self) -> None:
        check_fields(self)


class Sample:
    """One text as it grows: decodes tokens that are parts of characters, and ends at a stop text or last_token."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, *stops: str, last_token: int | None = None) -> None:
        """stops: where one of them occurs after the prompt, the text ends before it; empty ones do not count."""
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.last_token = last_token
        self.text = prompt
        self.prompt_end = len(prompt)
        self.shown = len(prompt)  # characters that cannot become a stop text any more
        self.done = False
        self.n_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Appends a token; returns the text that can be shown now: all but what may become a stop text."""
        self.n_tokens += 1
        if token == self.last_token:
            rest = self.finish()
            self.done = True
            return rest
        return self._append(self._decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """Ends the text; returns what was held back."""
        shown = self.shown
        self._append(self._decoder.decode(b"", final=True))
        self.shown = len(self.text)
        return self.text[shown:]

    def _append(self, new: str) -> str:
        if self.done:
            return ""
        self.text += new
        places = [self.text.find(stop, self.prompt_end) for stop in self.stops]
        at = min((place for place in places if place >= 0), default=None)
        if at is not None:
            self.text, self.done = self.text[:at], True
        tail = len(self.text)
        if not self.done:
            tail -= max((self._begun(stop) for stop in self.stops), default=0)
        before = self.shown
        self.shown = max(before, tail)
        return self.text[before : self.shown]

    def _begun(self, stop: str) -> int:
        """Characters of the longest end of the text with which the stop text begins."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n])), 0)


def write(
    model: GPT,
    prompts: Tensor,
    samples: list[Sample],
    config: GenerationConfig,
    replacing: Callable[[], AbstractContextManager[None]] = nullcontext,
    watch: Callable[[Tensor], None] | None = None,
) -> Iterator[list[str]]:
    """Continues prompts (B, T), one for each sample, until all have ended; yields what each can show after each token.

    replacing: InferenceEngine.replacing, in use while a token is computed and not in between. watch: as GPT.generate
    takes it.
    """
    tokens = model.generate(
        prompts,
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p,
        seed=config.seed,
        vocab_size=samples[0].tokenizer.vocab_size,
        watch=watch,
    )
    while not all(sample.done for sample in samples):
        with replacing():
            new = next(tokens, None)  # (B,)
        if new is None:
            break
        yield [sample.add(token) for sample, token in zip(samples, new.tolist(), strict=True)]
    yield [sample.finish() for sample in samples]
