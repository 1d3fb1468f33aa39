"""One text that a model generates: what is asked for, and how its tokens become text."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Annotated

from data.tokenizer import Tokenizer
from deskgpt.system.settings import Range, check_fields

PROMPT = "\n"  # the end of a line: what comes next begins a new one


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The settings of a text, which sample.py has among its own. Raises ConfigError."""

    # text
    max_new_tokens: Annotated[int, Range(1, 1_000_000)] = 500  # per sample
    stop: str = ""  # a sample ends before this text, if it occurs after the prompt; empty = none
    temperature: Annotated[float, Range(0, 100)] = 0.8  # below 1 = likelier text, above = rarer; 0 = the likeliest
    top_k: Annotated[int, Range(0, 1_000_000)] = 200  # draw from the k likeliest tokens; 0 = from all
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0  # draw from the likeliest tokens that have this probability together
    seed: Annotated[int, Range(0, 2**53 - 1)] = 1337  # sample i depends on seed + i; larger ones are not exact in JSON

    def __post_init__(self) -> None:
        check_fields(self)


class Sample:
    """One text as it grows: decodes tokens that are parts of characters, and ends at a stop text or last_token."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, *stops: str, last_token: int | None = None) -> None:
        """stops: if one of them occurs after the prompt, the text ends before it; empty ones do not count."""
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.last_token = last_token
        self.text = prompt
        self.prompt_end = len(prompt)
        self.shown = len(prompt)  # characters that cannot become a stop text any more
        self.done = False
        self.tokens: list[int] = []  # added so far
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Append a token; return the text that can be shown now: all but what may become a stop text."""
        self.tokens.append(token)
        if token == self.last_token:
            rest = self.finish()
            self.done = True
            return rest
        return self._append(self._decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """End the text; return what was held back."""
        shown = self.shown
        self._append(self._decoder.decode(b"", final=True))
        self.shown = len(self.text)
        return self.text[shown:]

    def _append(self, new: str) -> str:
        if self.done:
            return ""
        self.text += new
        found = [self.text.find(stop, self.shown) for stop in self.stops]
        end = min((at for at in found if at >= 0), default=None)
        if end is not None:
            self.text = self.text[:end]
            self.done = True
        final = len(self.text)
        if not self.done:
            final -= max((self._begun(stop) for stop in self.stops), default=0)
        before = self.shown
        self.shown = max(before, final)
        return self.text[before : self.shown]

    def _begun(self, stop: str) -> int:
        """Return the length of the longest end of the text with which the stop text begins."""
        longest = min(len(stop) - 1, len(self.text) - self.shown)
        return next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0)
