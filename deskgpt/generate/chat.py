"""The messages of a dialogue: those that another program sends, and those that fit into a model's context."""

from __future__ import annotations

from typing import Any

from data.chat.template import Message, Template, as_message
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
    if not messages or messages[-1].role != "user":
        raise ValueError("the last message must be the user's")
    return messages
