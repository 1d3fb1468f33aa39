"""A dialogue with a model: the messages that fit into its context, and a dialogue on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from data.chat.template import Message, Template, as_message
from data.tokenizer import Ids, valid_unicode
from deskgpt.system.terminal import shortened

ANSWER_PART = 8  # for an answer, one of this many parts of the context is left free


def fitting(template: Template, block_size: int, messages: list[Message]) -> list[Message]:
    """Return the messages without the oldest turns, if they do not fit into the context with room for an answer.

    A system message, which is the first one, is kept. Raises ValueError if it or the last message does not fit.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    turns = messages[len(system) :]
    room = block_size - max(1, block_size // ANSWER_PART) - len(template.prompt(system))
    first = len(turns)
    used = 0
    for at in reversed(range(len(turns))):
        used += len(template.encode([turns[at]]).ids) - 1  # without the token with which a dialogue begins
        if used > room:
            break
        if turns[at].role == "user":  # an answer without its question is left out
            first = at
    if first == len(turns):
        what = "the system message is too long" if room < 0 else f"the message takes {used:,} tokens"
        raise ValueError(f"{what}: {max(0, room):,} of the model's context of {block_size:,} are left for it; say less")
    return system + turns[first:]


def messages_in(value: Any) -> list[Message]:
    """Return the messages that another program sends: a JSON list that ends with the user's. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"messages={shortened(value)} must be a list")
    messages = [as_message(entry, n) for n, entry in enumerate(value, 1)]
    if any(message.role == "system" for message in messages[1:]):
        raise ValueError("only the first message can be the system's; put all of it there")
    turns = [message.role for message in messages if message.role != "system"]
    if not turns or turns[0] != "user" or turns[-1] != "user":
        raise ValueError("the first message after the system's and the last one must be the user's")
    return messages


def talk(template: Template, block_size: int, system: str, answer: Callable[[Ids, int], Iterator[str]]) -> None:
    """Read a line at a time and print the answer as it comes, until the input ends, or Ctrl+C.

    answer: yields the n-th answer, to a prompt (T,), in pieces. If the input is not a terminal, only the answers are
    printed. Raises ValueError if it is not UTF-8.
    """
    messages = [Message("system", system)] if system else []
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
                messages = fitting(template, block_size, [*messages, Message("user", valid_unicode(text))])
            except ValueError as e:
                print(f"error: {e}", file=sys.stderr)
                continue
            reply = ""
            for piece in answer(template.prompt(messages), n):
                print(piece, end="", flush=True)
                reply += piece
            print()
            messages.append(Message("assistant", reply))
            n += 1
    except UnicodeDecodeError as e:
        raise ValueError(f"the input is not UTF-8 text (byte {e.start:,}); convert it first") from None
    except (EOFError, KeyboardInterrupt):
        if on_terminal:
            print()
