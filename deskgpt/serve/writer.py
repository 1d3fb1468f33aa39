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
        if self.chat_template is not None:
            talk.Dialogue(self.chat_template, self.block_size, self.system)

    @property
    def block_size(self) -> int:
        return self.trained.model.config.block_size

    def begin(self, kind: type[Text], prompt: str, messages: Any, *stops: str) -> tuple[Text, Tensor]:
        """A text that answers messages in JSON, or continues the prompt if they are None; the tokens (1, T) before it.

        Raises ValueError, one line.
        """
        tokenizer = self.trained.tokenizer
        if messages is None:
            if not prompt:
                raise ValueError("the prompt is empty; send some text or a line break")
            ids = encode_prompt(prompt, tokenizer)
            text = kind(tokenizer, prompt, *stops)
        elif self.chat_template is not None:
            dialogue = talk.Dialogue.of(self.chat_template, self.block_size, messages)
            ids = torch.from_numpy(dialogue.prompt().astype("int64"))[None]
            text = kind(tokenizer, "", *stops, template.FORGED_TURN, last_token=self.chat_template.end_of_text)
        else:
            name = self.trained.name
            raise ValueError(f"{name} saw no chat data (docs/sampling.md); send a prompt, or serve it with --chat")
        return text, ids.to(next(self.trained.model.parameters()).device)
