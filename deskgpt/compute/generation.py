"""Text from a model, token by token: the loop of sample.py, of its page, and of samples during training."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model import GPT


class Tokenizer(Protocol):
    """What writing needs of a tokenizer of data/tokenizer.py."""

    vocab_size: int

    def decode_bytes(self, ids: list[int]) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What to write, by the names of sample.py's settings."""

    prompt: str
    stop: str  # empty = no stop text
    max_new_tokens: int
    temperature: float
    top_k: int  # 0 = draw from all tokens
    top_p: float
    seed: int


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
        shown, self.shown = self.shown, max(self.shown, tail)
        return self.text[shown : self.shown]

    def _begun(self, stop: str) -> int:
        """Characters of the longest end of the text with which the stop text begins."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n])), 0)


def write(
    model: GPT,
    prompts: Tensor,
    samples: list[Sample],
    wish: GenerationConfig,
    watch: Callable[[Tensor], None] | None = None,
) -> Iterator[list[str]]:
    """Continues prompts (B, T), one for each sample, until all samples have ended; yields what each can show by now.

    That is a list after each token, and at the end one of what was held back. watch: as GPT.generate takes it.
    """
    tokens = model.generate(
        prompts,
        wish.max_new_tokens,
        temperature=wish.temperature,
        top_k=wish.top_k or None,
        top_p=wish.top_p,
        seed=wish.seed,
        vocab_size=samples[0].tokenizer.vocab_size,
        watch=watch,
    )
    while not all(sample.done for sample in samples):
        new = next(tokens, None)  # (B,)
        if new is None:
            break
        yield [sample.add(token) for sample, token in zip(samples, new.tolist(), strict=True)]
    yield [sample.finish() for sample in samples]
