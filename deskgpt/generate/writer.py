"""A model for the page and for programs: it continues a prompt or answers a dialogue, one text at a time."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from data.chat import template
from data.tokenizer import Ids
from deskgpt.generate.chat import fitting, messages_in
from deskgpt.generate.engine import InferenceEngine
from deskgpt.generate.text import GenerationConfig, Sample
from deskgpt.generate.trained import Trained, encode_prompt
from deskgpt.system.terminal import shortened

Text = TypeVar("Text", bound=Sample)


@dataclass
class Writer:
    """A model that writes one text at a time. Raises ValueError if the system message is too long."""

    trained: Trained
    engine: InferenceEngine
    defaults: GenerationConfig
    prompt: str  # the page's at its start
    chat_template: template.Template | None  # None if the model does not talk
    system: str = ""  # the first message of the page's dialogue
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # who has it may ask
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a text is written

    def __post_init__(self) -> None:
        if self.chat_template is not None and self.system:
            first = template.Message("system", self.system)
            fitting(self.chat_template, self.block_size, [first, template.Message("user", "")])

    @property
    def block_size(self) -> int:
        return self.trained.model.config.block_size

    def begin(self, kind: type[Text], prompt: Any, messages: Any, *stops: str) -> tuple[Text, Tensor]:
        """Return a text that answers messages in JSON, or continues the prompt if they are None, and its prompt (1, T).

        Raises ValueError, one line.
        """
        if messages is not None and self.chat_template is not None:
            kept = fitting(self.chat_template, self.block_size, messages_in(messages))
            return self.answer(kind, self.chat_template.prompt(kept), *stops)
        if messages is not None:
            name = self.trained.name
            raise ValueError(f"{name} saw no chat data, so it completes a prompt only: send one to /v1/completions")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt={shortened(prompt)} must be a text, at least a line break")
        ids = encode_prompt(prompt, self.trained.tokenizer)
        return kind(self.trained.tokenizer, prompt, *stops), ids.to(self.engine.device)

    def answer(self, kind: type[Text], ids: Ids, *stops: str) -> tuple[Text, Tensor]:
        """Return a text that answers a dialogue's prompt, and the prompt (1, T)."""
        assert self.chat_template is not None
        stops = (*stops, template.FORGED_TURN)
        text = kind(self.trained.tokenizer, "", *stops, last_token=self.chat_template.end_of_text)
        return text, torch.from_numpy(ids.astype("int64"))[None].to(self.engine.device)
