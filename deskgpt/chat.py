"""A model that continues prompts and answers dialogues: for the page, for programs and on the
terminal.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.chat.template import FORGED_TURN, Message, Template
from data.tokenizer import END_OF_TEXT, valid_unicode
from deskgpt.engine import GenerationConfig, InferenceEngine, LoadedModel, Sample, encode_prompt
from deskgpt.errors import shortened

ANSWER_PART = 8  # for an answer, one of this many parts of the context is left free


@dataclass
class Writer:
    """A model that continues texts and answers dialogues.

    Raises ValueError if the system message is too long.
    """

    trained: LoadedModel
    engine: InferenceEngine
    defaults: GenerationConfig
    prompt: str  # the page's at its start
    chat_template: Template | None  # None if the model does not talk
    system: str = ""  # the first message of a dialogue

    def __post_init__(self) -> None:
        if self.chat_template is not None and self.system:
            self.answer([Message("system", self.system), Message("user", "")])

    @property
    def block_size(self) -> int:
        return self.trained.model.config.block_size

    def begin(self, prompt: Any, *stops: str) -> tuple[Sample, Tensor]:
        """Return a text that continues a program's prompt, and its tokens (1, T).

        Raises ValueError, one line.
        """
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt={shortened(prompt)} must be a text, at least a line break")
        ids = encode_prompt(prompt, self.trained.tokenizer)
        if ids.size(1) > self.block_size:
            raise ValueError(
                f"the prompt has {ids.size(1):,} tokens, and the model's context has "
                f"{self.block_size:,}; shorten it"
            )
        return Sample(self.trained.tokenizer, prompt, *stops), ids.to(self.engine.device)

    def answer(self, messages: list[Message], *stops: str) -> tuple[Sample, Tensor]:
        """Return a text that answers the last of the messages, and its prompt (1, T).

        Raises ValueError, one line.
        """
        if self.chat_template is None:
            name = self.trained.name
            raise ValueError(
                f"{name} saw no chat data, so it completes a prompt only: send one to "
                "/v1/completions"
            )
        ids = self.chat_template.prompt(fitting(self.chat_template, self.block_size, messages))
        text = Sample(self.trained.tokenizer, "", *stops, FORGED_TURN, END_OF_TEXT)
        return text, torch.from_numpy(ids.astype("int64"))[None].to(self.engine.device)


# ---- dialogues -----------------------------------------------------------------------------------


def fitting(template: Template, block_size: int, messages: list[Message]) -> list[Message]:
    """Return the messages without the oldest turns, if they do not fit into the context with room
    for an answer.

    A system message, which is the first one, is kept. Raises ValueError if it or the last message
    does not fit.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    turns = messages[len(system) :]
    room = block_size - max(1, block_size // ANSWER_PART) - len(template.prompt(system))
    # Each is encoded with the token that begins a dialogue, which does not count.
    sizes = [len(template.encode([turn]).ids) - 1 for turn in turns]
    used = sum(sizes)
    for first, turn in enumerate(turns):
        # An answer without its question is left out.
        if turn.role == "user" and used <= room:
            return system + turns[first:]
        used -= sizes[first]
    raise ValueError(
        f"the message takes {sizes[-1]:,} tokens, and the model's context of {block_size:,} "
        f"has room for {max(0, room):,} after the system message; say less"
    )


def talk(writer: Writer) -> None:
    """Read a line at a time and print the answer as it comes, until the input ends, or Ctrl+C.

    If the input is not a terminal, only the answers are printed. Raises ValueError if it is not
    UTF-8, and if none of its messages could be answered.
    """
    c = writer.defaults
    messages = [Message("system", writer.system)] if writer.system else []
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 (input() edits lines with it)
    n = 0
    refused = False
    try:
        while True:
            typed = input("you: " if on_terminal else "").strip()
            if not typed:
                continue
            try:
                question = Message("user", valid_unicode(typed))
                text, ids = writer.answer([*messages, question], c.stop)
            except ValueError as e:
                print(f"error: {e}", file=sys.stderr)
                refused = True
                continue
            for (shown,), _ in writer.engine.write(ids, [text], replace(c, seed=c.seed + n)):
                print(shown, end="", flush=True)
            print()
            messages += [question, Message("assistant", text.text)]
            n += 1
    except UnicodeDecodeError as e:
        raise ValueError(
            f"the input is not UTF-8 text (byte {e.start:,}); convert it first"
        ) from None
    except (EOFError, KeyboardInterrupt):
        if on_terminal:
            print()
        elif refused and not n:
            raise ValueError("no message was answered") from None
