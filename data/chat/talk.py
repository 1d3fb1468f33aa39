"""A dialogue on the terminal: the messages that fit into the model's context, and the next answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from data.chat.template import Message, Template, as_message
from data.tokenizer import Ids, valid_unicode
from deskgpt.system.terminal import shortened

LEAST_ROOM = 4  # for an answer, at least this part of the context is left free

Answer = Callable[[Ids, int], Iterator[str]]  # of a prompt and the number of the answer: its text, in pieces


class Dialogue:
    """The messages so far. The oldest turns are forgotten once they do not fit; the system's message never is.

    Raises ValueError where the system's message leaves no room.
    """

    def __init__(self, template: Template, block_size: int, system: str = "") -> None:
        self.template = template
        self.most_tokens = block_size - max(1, block_size // LEAST_ROOM)  # of a prompt
        self.system = [Message("system", system)] if system else []
        self.messages: list[Message] = []  # the user's and the assistant's
        if len(self.prompt()) > self.most_tokens:
            raise ValueError(
                f"the system's message takes {len(self.prompt()):,} tokens with its header, and {self.most_tokens:,} "
                f"of the model's context of {block_size:,} are for what was said; take a shorter one"
            )

    @classmethod
    def of(cls, template: Template, block_size: int, value: Any) -> Dialogue:
        """The dialogue that the user of another program sends, as a list in JSON, with what they say last.

        Raises ValueError if it is not such a list, or does not fit.
        """
        if not isinstance(value, list):
            raise ValueError(f"messages={shortened(value)} must be a list")
        messages = [as_message(entry, n) for n, entry in enumerate(value, 1)]
        system = messages.pop(0).content if messages and messages[0].role == "system" else ""
        if any(message.role == "system" for message in messages):
            raise ValueError("only the first message can be the system's; put all of it there")
        if not messages or messages[0].role != "user" or messages[-1].role != "user":
            raise ValueError("the first message after the system's and the last one must be the user's")
        dialogue = cls(template, block_size, system)
        dialogue.messages = messages[:-1]
        dialogue.ask(messages[-1].content)
        return dialogue

    def ask(self, text: str) -> None:
        """The user says something. Raises ValueError, and forgets it, if it does not fit by itself."""
        messages = [*self.messages, Message("user", text)]
        # Without the first token, with which a dialogue begins.
        sizes = [len(self.template.encode([message]).ids) - 1 for message in messages]
        room = self.most_tokens - len(self.template.prompt(self.system))
        if sizes[-1] > room:
            raise ValueError(
                f"this takes {sizes[-1]:,} tokens, and the model's context has room for {room:,}; say less"
            )
        first = 0
        while sum(sizes[first:]) > room or messages[first].role != "user":  # whole turns only
            first += 1
        self.messages = messages[first:]

    def answered(self, text: str) -> None:
        self.messages.append(Message("assistant", text))

    def prompt(self) -> Ids:
        """What the next answer continues (n,)."""
        return self.template.prompt(self.system + self.messages)


def talk(dialogue: Dialogue, answer: Answer) -> None:
    """Reads a line at a time and prints the answer as it comes, until the input ends, or Ctrl+C.

    If the input is not a terminal, only the answers are printed. Raises ValueError if it is not UTF-8.
    """
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 (input() edits lines with it)
    n = 0
    try:
        while True:
            text = input("you: " if on_terminal else "").strip()
            if not text:
                continue
            try:
                dialogue.ask(valid_unicode(text))
            except ValueError as e:
                print(f"error: {e}", file=sys.stderr)
                continue
            reply = ""
            for piece in answer(dialogue.prompt(), n):
                print(piece, end="", flush=True)
                reply += piece
            print()
            dialogue.answered(reply)
            n += 1
    except UnicodeDecodeError as e:
        raise ValueError(f"the input is not UTF-8 text (byte {e.start:,}); convert it first") from None
    except (EOFError, KeyboardInterrupt):
        if on_terminal:
            print()
