"""A model for the page and for programs: it continues a prompt or answers a dialogue, one text at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from data.chat import talk, template
from data.tokenizer import Ids
from deskgpt.compute.generation import GenerationConfig, Sample
from deskgpt.sampling.trained import Trained, encode_prompt

Text = TypeVar("Text", bound=Sample)


@dataclass
class Writer:
    """A model that writes one text at a time. Raises ValueError if the system message is too long."""

    trained: Trained
    replacing: Callable[[], AbstractContextManager[None]]  # InferenceEngine.replacing
    defaults: GenerationConfig
    chat_template: template.Template | None  # None if the model does not talk
    system: str = ""  # the first message of the page's dialogue
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # who has it may ask
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a text is written

    def __post_init__(self) -> None:
        if self.chat_template is not None and self.system:
            first = template.Message("system", self.system)
            talk.fitting(self.chat_template, self.block_size, [first, template.Message("user", "")])

    @property
    def block_size(self) -> int:
        return self.trained.model.config.block_size

    def begin(self, kind: type[Text], prompt: str, messages: Any, *stops: str) -> tuple[Text, Tensor]:
        """A text that answers messages in JSON, or continues the prompt if they are None; the tokens (1, T) before it.

        Raises ValueError, one line.
        """
        if messages is not None and self.chat_template is not None:
            kept = talk.fitting(self.chat_template, self.block_size, talk.messages_in(messages))
            return self.answer(kind, self.chat_template.prompt(kept), *stops)
        if messages is not None:
            name = self.trained.name
            raise ValueError(f"{name} saw no chat data (docs/sampling.md); send a prompt, or serve it with --chat")
        if not prompt:
            raise ValueError("the prompt is empty; send some text or a line break")
        ids = encode_prompt(prompt, self.trained.tokenizer)
        return kind(self.trained.tokenizer, prompt, *stops), ids.to(self.device)

    def answer(self, kind: type[Text], ids: Ids, *stops: str) -> tuple[Text, Tensor]:
        """A text that answers a dialogue's prompt; the prompt (1, T)."""
        assert self.chat_template is not None
        stops = (*stops, template.FORGED_TURN)
        text = kind(self.trained.tokenizer, "", *stops, last_token=self.chat_template.end_of_text)
        return text, torch.from_numpy(ids.astype("int64"))[None].to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.trained.model.parameters()).device
